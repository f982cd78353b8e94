#!/usr/bin/env bash
# ./run.sh [SCRIPT.py] [--runs N] [options of the script]
#
# Finds or makes a Python environment, gets the data, and trains SCRIPT.py (train_gpt.py): the preset `record`
# on 8, 4, 2 or 1 GPUs; without any, `cpu` or, with --preset words, `words` in 2 processes.
#
#   --runs N    N runs, with seeds S..S+N-1 (S: --seed, default 0). With --name NAME a table of them follows
#   --data DIR  train on the shards in DIR; nothing is downloaded
#
# `python train_gpt.py -h` lists the script's options. Variables: PYTHON, to use or to make .venv with;
# NPROC_PER_NODE; and on several machines NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT, as torchrun's.

set -euo pipefail
say() { echo "$(basename "$0"): $*"; }
die() { say "$*" >&2; exit 1; }

count_gpus() {   # those that nvidia-smi lists, or those that CUDA_VISIBLE_DEVICES names
    local gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ' || true)
    if (( gpus )) && [[ -n ${CUDA_VISIBLE_DEVICES+set} ]]; then
        gpus=$(tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -c '^[^-]' || true)
    fi
    echo "$gpus"
}

suitable() {   # PYTHON GPUS: imports for real, since a broken installation has a version too
    "$1" -c 'import sys, huggingface_hub, numpy, tiktoken, torch, tqdm
too_old = [int(n) for n in torch.__version__.split(".")[:2]] < [2, 11]
sys.exit(too_old or (sys.argv[1] != "0" and not torch.version.cuda))' "$2" >/dev/null 2>&1
}

pip_install() { "$python" -m pip install -qq --disable-pip-version-check "$@"; }

find_environment() {   # GPUS: sets `python` to one that can train here; makes .venv if there is none
    local gpus=$1 stamp=.venv/installed-requirements.txt
    python=$(command -v "${PYTHON:-python3}") || die "there is no ${PYTHON:-python3}"
    if suitable "$python" "$gpus"; then return; fi
    if cmp -s requirements.txt "$stamp" && suitable .venv/bin/python "$gpus"; then
        python=$PWD/.venv/bin/python
        return
    fi
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || die "$python is older than Python 3.10"
    say "making .venv with $python; this installs torch and the other requirements, and takes minutes"
    "$python" -m venv --clear .venv || die "install venv (Debian: apt install python3-venv), or set PYTHON"
    python=$PWD/.venv/bin/python
    if (( ! gpus )); then   # the build for CPUs is much smaller, but not in every package index
        pip_install --timeout 5 --retries 0 --no-deps --index-url https://download.pytorch.org/whl/cpu \
            "$(grep '^torch==' requirements.txt)" 2>/dev/null || true
    fi
    pip_install -r requirements.txt
    suitable "$python" "$gpus" || die "torch in .venv does not import, or lacks CUDA; set PYTHON"
    cp requirements.txt "$stamp"   # last, so that an interrupted installation is done again
}

cd "$(dirname "${BASH_SOURCE[0]}")"
if [[ ${BASH_SOURCE[0]} != "$0" ]]; then return; fi   # test.sh needs the functions above

export RUN_COMMAND="./run.sh$(printf ' %q' "$@")"   # compare.py quotes it in the README of a record
script=train_gpt.py preset='' data='' runs='' seed=0 name='' args=()
if [[ ${1-} == *.py ]]; then script=$1; shift; fi
[[ -f $script ]] || die "$PWD has no $script"
while (( $# )); do
    option=${1%%=*} value=${1#*=}
    case $1 in --runs|--seed|--name|--preset|--data)
        (( $# > 1 )) || die "$1 needs a value"
        value=$2; shift ;;
    esac
    case $option in
        -h|--help) sed -n '2,/^$/s/^# \{0,1\}//p' run.sh; exit ;;
        --runs) runs=$value ;;
        --seed) seed=$value ;;
        --preset) preset=$value ;;
        --name) name=$value; args+=(--name "$value") ;;
        --data) data=$value; args+=(--data "$value") ;;
        *) args+=("$1") ;;
    esac
    shift
done
[[ ${runs:-1},$seed =~ ^[1-9][0-9]*,[0-9]+$ ]] || die "--runs needs a number from 1 on, --seed one from 0 on"

gpus=$(count_gpus) processes=2
if (( gpus )); then for processes in 8 4 2 1; do (( processes > gpus )) || break; done; fi
if [[ ! $preset ]]; then (( gpus )) && preset=record || preset=cpu; fi
args+=(--preset "$preset")
find_environment "$gpus"
processes=${NPROC_PER_NODE:-$processes} nodes=${NNODES:-1} node=${NODE_RANK:-0} launch=(--standalone)
threads=$(( gpus ? 1 : ($(getconf _NPROCESSORS_ONLN) + processes - 1) / processes ))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$threads} TORCH_CPP_LOG_LEVEL=${TORCH_CPP_LOG_LEVEL:-ERROR}
if (( nodes > 1 )); then
    launch=(--nnodes="$nodes" --node_rank="$node"
        --master_addr="${MASTER_ADDR:?}" --master_port="${MASTER_PORT:-29500}")
fi
if grep -q '"--check"' "$script"; then   # options and machine, before a download; early records lack it
    "$python" "$script" "${args[@]}" --check $(( nodes * processes )) >/dev/null
fi
declare -A sources=([cpu]="local_corpus.py" [words]="local_corpus.py --encoding gpt2")
if [[ ! $data ]]; then "$python" data/${sources[$preset]:-fineweb.py}; fi

trap 'kill $! 2>/dev/null; wait; exit 130' HUP INT TERM   # torchrun then ends its processes
for (( i = 0; i < ${runs:-1}; i++ )); do
    say "$script, preset $preset, seed $(( seed + i )), $processes processes, started by $python"
    (( ! node )) || say "this is node $node of $nodes; losses and log appear on node 0, $MASTER_ADDR"
    "$python" -m torch.distributed.run "${launch[@]}" --nproc_per_node="$processes" \
        "$script" --seed $(( seed + i )) "${args[@]}" &
    wait $!
done
if [[ $runs && $name ]] && (( ! node )); then
    "$python" records/compare.py --begin "$(ls -d records/*/????-??-??_"$name" | tail -n 1)"
elif [[ ! $name ]] && (( ! node )); then
    say "to compare settings, make several runs of each (--runs 3 --name A), and give compare.py the folders"
fi
