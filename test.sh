#!/usr/bin/env bash
# ./test.sh [pytest options or tests]: runs the tests, on a fresh machine too; without arguments, all of them.
# It uses the environment of run.sh, and adds to it what only the tests need.

set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/run.sh"

find_environment "$(count_gpus)"
wanted="pytest scipy matplotlib"
if [[ $(uname -sm) == "Linux x86_64" ]]; then
    wanted+=" triton"   # torch's CPU build brings none, yet triton's interpreter runs our kernels without a GPU
fi
missing=$("$python" -c '
import importlib.util, sys
print(*(name for name in sys.argv[1:] if not importlib.util.find_spec(name)))' $wanted)
if [[ $missing ]]; then
    say "installing $missing"
    pip_install "$python" $missing || die "pip could not install $missing (see above); start again to retry"
fi

# All of them in two halves of about the same length, side by side: most tests leave a core idle, waiting for processes.
half=(tests/test_{kernels,compiled,switches,no_sync,golden,reference,step_time,data,fineweb,script,run_sh}.py)
if (( $# == 0 )) && ls "${half[@]}" > /dev/null 2>&1; then
    rest=()
    for file in tests/test_*.py; do
        [[ " ${half[*]} " == *" $file "* ]] || rest+=("$file")
    done
    output=$(mktemp)
    "$python" -m pytest -p no:cacheprovider "${half[@]}" > "$output" 2>&1 &
    trap 'kill $! 2> /dev/null || true; rm -f "$output"' EXIT   # a failure in a trap would become the exit status
    status=0
    "$python" -m pytest "${rest[@]}" || status=$?
    wait $! || status=$?
    cat "$output"
    exit "$status"
fi

for argument in "$@"; do
    if [[ -e ${argument%%::*} ]]; then exec "$python" -m pytest "$@"; fi
done
exec "$python" -m pytest tests "$@"
