#!/usr/bin/env bash
# ./run.sh [SCRIPT.py] [--runs N] [--against OTHER.py] [options of the script]
#
# Finds or makes a Python environment, gets the data, and trains SCRIPT.py (train_gpt.py): the preset `record`
# on 8, 4, 2 or 1 GPUs; without any, `cpu` or, with --preset words, `words` in 2 processes. --runs N: N runs,
# with seeds from --seed (0) on; if they have a --name, a table follows. --against OTHER.py: OTHER.py follows
# each run, as a record's baseline, with the same preset, data and seed but no other option; it needs a new
# --name. --data DIR: nothing is downloaded. `python train_gpt.py -h` lists the script's options. Variables:
# PYTHON, to use or to make .venv with; NPROC_PER_NODE; and, as torchrun's on several machines, NNODES,
# NODE_RANK, MASTER_ADDR and MASTER_PORT.

set -euo pipefail
# If the screen is closed, as by 2>&-, other files would be in its place, and bash's own, this one, is
[[ -e /dev/fd/1 && ! /dev/fd/1 -ef $0 ]] || exec >/dev/null
[[ -e /dev/fd/2 && ! /dev/fd/2 -ef $0 ]] || exec 2>/dev/null
source "$(dirname -- "${BASH_SOURCE[0]}")/environment.sh"

export RUN_COMMAND=$(printf '%q\n' "${0/#run.sh/./run.sh}" "$@" | paste -sd ' ' -)   # for compare.py, too
script=train_gpt.py against='' name='' preset='' data='' runs=1 seed=0 args=()
if [[ ${1-} == *.py ]]; then script=$(from_caller "$1"); shift; fi
[[ -f $script ]] || die "there is no $script"
while (( $# )); do
    if [[ $1 =~ ^--(runs|seed|preset|data|save|resume|against|name)$ ]]; then set -- "$1=${2-}" "${@:3}"; fi
    [[ ! $1 =~ ^--[a-z-]+=$ ]] || die "${1%=} needs a value"
    case $1 in
        -h|--help) sed -n '2,/^$/s/^# \{0,1\}//p' run.sh; exit ;;
        --check|--check=*) die "only python $script takes --check" ;;
        --runs=*|--seed=*|--preset=*|--name=*) declare "${1#--}" ;;
        --against=*) against=$(from_caller "${1#*=}") ;;
        --data=*) data=$(from_caller "${1#*=}") ;;
        --save=*|--resume=*) args+=("${1%%=*}=$(from_caller "${1#*=}")") ;;
        *) args+=("$1") ;;
    esac
    shift
done
if [[ ! $preset ]]; then (( gpus )) && preset=record || preset=cpu; fi
same=(--preset="$preset" ${data:+--data="$data"})
args+=("${same[@]}" ${name:+--name="$name"})
if [[ $against ]]; then
    [[ -f $against && $name ]] || die "--against needs a script that is there, and --name"
    [[ "${args[*]}" != *--@(resume|save|profile|checkpoint-every)* ]] ||
        die "--against goes without --resume, --save, --profile and --checkpoint-every"
    ! compgen -G "records/*/$(date +%F)_$name" || die "that is there; give another --name, and new seeds"
fi
runs=$(whole --runs "$runs" 1 1000000)
[[ $runs == 1 || " ${args[*]}" != *' --'@(save|resume)=* ]] || die "--save and --resume need --runs 1"
seed=$(whole --seed "$seed" 0 $(( 9223372036854775807 - runs )))
processes=$(whole NPROC_PER_NODE "${NPROC_PER_NODE:-$(( gpus ? gpus : 2 ))}" 1 10000)
nodes=$(whole NNODES "${NNODES:-1}" 1 10000)
node=$(whole NODE_RANK "${NODE_RANK:-0}" 0 $(( nodes - 1 )))
threads=$(( gpus ? 1 : ($(getconf _NPROCESSORS_ONLN) - 1) / processes + 1 ))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$threads}
# Large pages: fewer page faults, and address translations that fit in the CPU's tables
(( gpus )) || export GLIBC_TUNABLES=${GLIBC_TUNABLES-glibc.malloc.hugetlb=1}
if (( nodes > 1 )); then
    launch=(--nnodes="$nodes" --node_rank="$node")
    launch+=(--master_addr="${MASTER_ADDR:?is needed with NNODES}" --master_port="${MASTER_PORT:-29500}")
else   # the machine's name may have no address
    launch=(--standalone --local_addr=localhost)
    if [[ $(uname) == Linux ]]; then export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-lo}; fi
fi

train() {   # a background job, so that signals reach the shell, which waits for it
    watch &
    find_environment
    echo "$python" >"$folder/python"
    if grep -q '"--check"' "$script"; then   # options and machine, before a download; early records lack it
        "$python" "$script" "${args[@]}" --check $((nodes * processes)) >/dev/null
    fi
    if (( gpus )) && [[ $preset == record ]]; then
        works 'import triton; triton.runtime.driver.active.get_current_device()' ||
            die "Triton: $problem; it needs a C compiler and Python.h (Debian: gcc python3-dev)"
    fi
    [[ ! $against ]] || works 'import scipy' || die "compare.py needs scipy: $problem"
    declare -A sources=([cpu]="local_corpus.py" [words]="local_corpus.py --encoding gpt2")
    [[ $data ]] || "$python" data/${sources[$preset]:-fineweb.py}
    for (( ; runs; runs--, seed++ )); do
        start "$script" "${args[@]}"
        [[ ! $against ]] || start "$against" "${same[@]}" --name="$name/baseline"
    done
}
start() {   # SCRIPT OPTION...
    say "$1, preset $preset, seed $seed, $processes processes${NNODES:+, node $node}, python $python"
    mkdir "$folder/ranks"   # where every rank enters its process group, -ID, before it begins
    local rank=(sh -c ': 2>/dev/null >"$0/-$$" && exec "$@"' "$folder/ranks" "$python" "$1")
    rank+=(--seed="$seed" "${@:2}")
    "$python" -c "$module" torch.distributed.run "${launch[@]}" --nproc_per_node="$processes" \
        --no-python "${rank[@]//\$/\$\$}"   # torchrun makes one $ of two
    rm -r "$folder/ranks"
}
watch() {   # waits until the shell writes to the pipe or was killed; ends the ranks and the group of train()
    trap '' HUP INT QUIT TERM
    read -ru 4 || true
    mv "$folder/ranks" "$folder/ended" 2>/dev/null && kill -KILL -- $(ls "$folder/ended") 2>/dev/null || true
    kill -KILL 0
}
# The names of the runs' logs, and an empty line where a run begins
logs() { sed -nE "s/^$(basename "$0"): .*//p; s/^log:? +(.*\.txt)$/\1/p" "$folder/output"; }
from_script() { if [[ -e $1 ]]; then echo "$1"; else echo "$(dirname "$script")/$1"; fi; }   # a path
finish() { echo >&4; exec 3>&-; wait "$screen"; }   # the screen ends when nothing can write to it
stop() {   # STATUS: ends what still runs, and says how to continue
    trap '' HUP INT QUIT TERM
    local log run checkpoint
    disown -a   # bash would report how they end
    finish || true
    exec >&2
    log=$(logs | tail -n 1 | grep .) && [[ -d $folder/ended ]] || exit "$1"   # none is named, or under way
    log=$(from_script "$log") run=${log##*/}
    [[ $caller -ef . || $log == /* ]] || log=$PWD/$log
    checkpoint=$(ls "${log%/*}/${run%%.*}.checkpoint" 2>/dev/null | grep -x 'step[0-9]*' | tail -n 1) || true
    echo $'\n'"$(say "unfinished; log: $log; checkpoint: ${checkpoint:-none}")"
    (( runs == 1 )) || RUN_COMMAND+=" --runs 1 --seed $(tr -dc 0-9 <<<"${run%%_*}")"
    [[ ! $against ]] || say "begin again with another --name and new seeds"
    [[ ! $checkpoint ]] || echo "$RUN_COMMAND --resume $(printf '%q' "$log")"
    exit "$1"
}

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
if [[ -t 1 && -t 2 ]]; then erase=$'\r\e[K'; fi   # the progress bar
exec 3> >(trap '' HUP INT QUIT TERM; tee "$folder/output" | { sed -u "s/^/${erase-}/" || cat >/dev/null; })
screen=$!
mkfifo "$folder/alive"
exec 4<>"$folder/alive"   # only this shell can write to it
for signal in 1 2 3 15; do trap "stop $(( 128 + signal ))" $signal; done   # HUP, INT, QUIT, TERM
set -m
train </dev/null >&3 3>&- 4<"$folder/alive" &
set +m
wait $! || stop $?
finish
[[ $runs == 1 && ! $against ]] || folders=$(logs | sed -nE 's#(/baseline)?/[^/]*$##p' | sort -u)
case ${folders-} in
    ''|*/attempts) ;;
    *$'\n'*) say "no table, because midnight passed, or an option changes the track:" $folders ;;
    *) "$(<"$folder/python")" records/compare.py --begin "$(from_script "$folders")" ;;
esac
