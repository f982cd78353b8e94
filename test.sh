#!/usr/bin/env bash
# ./test.sh [--fast | --idea | --all | --cpus] [pytest options or tests]
#
# Without arguments: ruff, mypy and all tests but those marked long, in six minutes on two cores. --all:
# those, too, in a quarter of an hour. --fast: tests under a second each, in two minutes. --idea: of these,
# those that still hold when the model, the optimizer or the schedule has changed. --cpus: tests of numbers,
# as older CPUs compute them. Of a named file all tests run. The environment is run.sh's, with what tests
# need.

set -euo pipefail
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/environment.sh"
marked="not long"
case ${1-} in
    --fast) marked="not slow" ;;
    --idea) marked="not slow and not pinned" ;;
    --all) marked='' ;;
    --cpus) exec .ci/cpus "${@:2}" ;;
    *) set -- "" "$@" ;;
esac
shift
[[ "$marked $*" != "not long "*tests/* ]] || marked=''

for test in "$@"; do
    [[ $test != *.py* || $test == *tests/* ]] || die "$test is no test; tests try train_gpt.py: put a copy there"
done
find_environment huggingface_hub matplotlib safetensors scipy tiktoken
works 'import mypy, pytest, ruff, xdist' || pip_install -r tests/requirements.txt
# torch for CUDA brings its Triton; torch for CPUs has none.
works 'import triton' || pip_install 'triton==3.7.1; sys_platform == "linux" and platform_machine == "x86_64"'
if [[ $# == 0 && $marked != "not slow"* ]]; then
    "$python" -m ruff format --check .
    "$python" -m ruff check .
    "$python" -m mypy
fi
"${tied[@]}" "$python" -m pytest -m "$marked" --numprocesses=auto --maxprocesses=8 --dist=worksteal "$@"
