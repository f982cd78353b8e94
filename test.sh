#!/usr/bin/env bash
# ./test.sh [--fast | --cpus] [pytest options or tests]
#
# Runs the tests, on a fresh machine too, on all cores; without arguments, all of them.
#
#   --fast   those that take less than a second: every section of the script, in a minute
#   --cpus   the numeric ones, as on CPUs without AVX-512, and without any vector instructions
#
# It uses the environment of run.sh, and adds to it what only the tests need.

set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/run.sh"

mode=''
case ${1-} in --fast|--cpus) mode=$1; shift ;; esac

find_environment "$(count_gpus)"
packages="pytest pytest-xdist scipy matplotlib"
if [[ $(uname -sm) == "Linux x86_64" ]]; then
    packages+=" triton"   # torch's CPU build brings none, yet triton's interpreter runs our kernels without a GPU
fi
missing=$("$python" -c '
import importlib.util, sys
modules = {"pytest-xdist": "xdist"}
print(*(name for name in sys.argv[1:] if not importlib.util.find_spec(modules.get(name, name))))' $packages)
if [[ $missing ]]; then
    say "installing $missing"
    pip_install "$python" $missing || die "pip could not install $missing (see above); start again to retry"
fi

# One process a core, each with the tests of a few files in turn: most leave a core idle, waiting for processes.
test() { "$python" -m pytest --numprocesses="$(getconf _NPROCESSORS_ONLN)" --maxprocesses=8 --dist=worksteal "$@"; }

case $mode in
    --fast) test -m "not slow" "$@" ;;
    --cpus)
        # OpenBLAS is numpy's, under Triton's interpreter; ATen, oneDNN and MKL are torch's.
        for settings in "OPENBLAS_CORETYPE=Haswell ATEN_CPU_CAPABILITY=avx2" ATEN_CPU_CAPABILITY=default \
                        "ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2"; do
            say "with $settings"
            ( export $settings; test -q -m numeric "$@" )
        done ;;
    *) test "$@" ;;
esac
