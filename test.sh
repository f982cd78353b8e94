#!/usr/bin/env bash
# ./test.sh [--fast | --cpus] [pytest options or tests]
#
# Runs the tests, on a fresh machine too. Without arguments: ruff, mypy and all tests, one process per core.
# Named tests run in one process.
#
#   --fast   tests that take less than a second: every section of the script, in 1.5 minutes
#   --cpus   numeric tests, as on a CPU with AVX2 but no AVX-512, then as on one with neither
#
# It uses the environment of run.sh, and adds what only the tests need.

set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/run.sh"

mode=''
case ${1-} in --fast|--cpus) mode=$1; shift ;; esac

find_environment "$(count_gpus)"
packages="pytest pytest-xdist scipy matplotlib safetensors"
if [[ $#$mode == 0 ]]; then packages+=" ruff==0.17.6 mypy"; fi
if [[ $(uname -sm) == "Linux x86_64" ]]; then
    packages+=" triton"   # torch's CPU build brings none, yet triton's interpreter runs our kernels without a GPU
fi
missing=$("$python" -c '
import importlib.util, sys
modules = {"pytest-xdist": "xdist"}
wanted = {name: modules.get(name, name.split("==")[0]) for name in sys.argv[1:]}
print(*(name for name, module in wanted.items() if not importlib.util.find_spec(module)))' $packages)
if [[ $missing ]]; then
    say "installing $missing"
    pip_install "$python" $missing || die "pip could not install $missing (see above); start again to retry"
fi

# Each process begins with its share of the files; one that is done takes tests from another.
workers=(--numprocesses="$(getconf _NPROCESSORS_ONLN)" --maxprocesses=8 --dist=worksteal)
for argument in "$@"; do
    if [[ -e ${argument%%::*} ]]; then workers=(); fi
done
run_tests() { "$python" -m pytest ${workers[@]+"${workers[@]}"} "$@"; }   # bash 3.2 takes an empty array for an unset one

case $mode in
    --fast) run_tests -m "not slow" "$@" ;;
    --cpus)   # OpenBLAS is numpy's, which Triton's interpreter computes with; ATen, oneDNN and MKL are torch's
        for settings in \
            "OPENBLAS_CORETYPE=Haswell ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2" \
            "OPENBLAS_CORETYPE=Nehalem ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 MKL_ENABLE_INSTRUCTIONS=SSE4_2"
        do
            say "with $settings"
            ( export $settings; run_tests -q -m numeric "$@" )
        done ;;
    *)
        if [[ $# == 0 ]]; then
            "$python" -m ruff format --check --quiet . || die "ruff format would change these files: run it"
            "$python" -m ruff check . || die "ruff found the above"
            "$python" -m mypy || die "mypy found the above"
        fi
        run_tests "$@" ;;
esac
