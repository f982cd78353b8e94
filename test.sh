#!/usr/bin/env bash
# ./test.sh [--fast | --all | --cpus] [pytest options or tests]
#
# Without arguments: ruff, mypy and all tests but those marked long, in six minutes on two cores. The
# environment is that of run.sh, and gets what only tests need. --all: those marked long, too, in a quarter of
# an hour. --fast: tests under a second each, of every section of the script, in two minutes. --cpus: tests
# marked numeric, as on a CPU without AVX-512, then as on one without AVX2. Of a named file, all tests run.

set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/environment.sh"
mode=default
case ${1-} in --fast|--all|--cpus) mode=$1; shift ;; esac

find_environment
packages=(pytest pytest-xdist scipy matplotlib safetensors ruff==0.17.6 mypy)
# torch for CUDA needs a Triton, which is there; torch for CPUs has none.
[[ $(uname -sm) == "Linux x86_64" ]] &&
    works 'from importlib.metadata import requires; sys.exit("triton" in str(requires("torch")))' &&
    packages+=("$(grep -o 'triton==[0-9.]*' requirements.txt)")
works "from importlib.metadata import version
for name, _, pinned in [package.partition('==') for package in '${packages[*]}'.split()]:
    pinned in ('', version(name)) or sys.exit(1)" ||
    { say "installing ${packages[*]}"; pip_install "${packages[@]}"; }

pytest=("$python" -c "$module" pytest)
if [[ $* != *tests/* ]]; then   # named tests run in one process
    pytest+=(--numprocesses="$(getconf _NPROCESSORS_ONLN)" --maxprocesses=8 --dist=worksteal)
fi
case $mode$# in
    --cpus*)   # OpenBLAS is numpy's and so Triton's interpreter's; ATen, oneDNN and MKL are torch's
        export OPENBLAS_CORETYPE=Haswell ATEN_CPU_CAPABILITY=avx2
        export ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 MKL_CBWR=AVX2   # MKL_CBWR: on AMD too
        "${pytest[@]}" -q -m numeric "$@"
        export OPENBLAS_CORETYPE=Nehalem ATEN_CPU_CAPABILITY=default
        export ONEDNN_MAX_CPU_ISA=SSE41 MKL_ENABLE_INSTRUCTIONS=SSE4_2 MKL_CBWR=COMPATIBLE
        pytest+=(-q -m numeric) ;;
    --fast*) pytest+=(-m "not slow") ;;
    default0|--all0) for check in "ruff format --check ." "ruff check ." mypy; do "$python" -c "$module" $check; done ;;
esac
if [[ $mode == default && $* != *tests/* ]]; then pytest+=(-m "not long"); fi
"${pytest[@]}" "$@"
