#!/usr/bin/env bash
# ./test.sh [--fast | --cpus] [pytest options or tests]
#
# Without arguments: ruff, mypy and all tests, in about seven minutes on two cores. It uses the environment of
# run.sh, and adds what only tests need.
#
#   --fast   tests that take less than a second, of every section of the script: about a minute
#   --cpus   tests marked numeric, as on a CPU with AVX2 but no AVX-512, then as on one with neither

set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/run.sh"
mode=all
case ${1-} in --fast|--cpus) mode=$1; shift ;; esac

find_environment "$(count_gpus)"
packages=(pytest pytest-xdist scipy matplotlib safetensors ruff==0.17.6 mypy)
if [[ $(uname -sm) == "Linux x86_64" ]]; then packages+=(triton); fi   # torch for CPUs has none
if ! "$python" -c 'import pytest, xdist, scipy, matplotlib, safetensors, ruff, mypy, triton' 2>/dev/null; then
    say "installing ${packages[*]}"
    pip_install "${packages[@]}"
fi

pytest=("$python" -m pytest --numprocesses="$(getconf _NPROCESSORS_ONLN)" --maxprocesses=8 --dist=worksteal)
if [[ $* == *tests/* ]]; then pytest=("$python" -m pytest); fi   # named tests run in one process
case $mode in
    --fast) "${pytest[@]}" -m "not slow" "$@" ;;
    --cpus)   # OpenBLAS is numpy's and so Triton's interpreter's; ATen, oneDNN and MKL are torch's
        export OPENBLAS_CORETYPE=Haswell ATEN_CPU_CAPABILITY=avx2
        export ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2
        "${pytest[@]}" -q -m numeric "$@"
        export OPENBLAS_CORETYPE=Nehalem ATEN_CPU_CAPABILITY=default
        export ONEDNN_MAX_CPU_ISA=SSE41 MKL_ENABLE_INSTRUCTIONS=SSE4_2
        "${pytest[@]}" -q -m numeric "$@" ;;
    all)
        if (( ! $# )); then
            "$python" -m ruff format --check . && "$python" -m ruff check . && "$python" -m mypy
        fi
        "${pytest[@]}" "$@" ;;
esac
