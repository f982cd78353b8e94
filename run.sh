#!/usr/bin/env bash
# ./run.sh [SCRIPT.py] [--tiny] [--runs N] [--against OTHER.py] [options of the script]
#
# Finds or makes a Python environment, gets the data, and trains SCRIPT.py (train_gpt.py): the preset `record`
# on 8, 4, 2 or 1 GPUs; without any, `cpu`. `cpu` and `words` take two processes on the CPU, also if there are
# GPUs. --tiny: ten steps or so, in 20 seconds, to see whether the script runs. --runs N: N runs, with seeds
# from --seed (0) on; if they have a --name, a table follows. --against OTHER.py: OTHER.py follows each run,
# as a record's baseline, with the same preset, data and seed but no other option; it needs a new --name; then
# the referee tries SCRIPT.py; with --tiny it is a rehearsal, without name and referee. --data DIR: nothing is
# downloaded. `python train_gpt.py -h` lists more options.
# Paths are relative to this folder. Variables: PYTHON, to use or to make .venv with; NPROC_PER_NODE.

set -euo pipefail
# A run outlives who reads it, such as `head`, and a screen that was closed by >&-.
writable() { [[ -t $1 || -f /dev/fd/$1 && ! /dev/fd/$1 -ef $0 ]]; }   # $0 is in the place of a closed one
writable 1 && writable 2 || exec > >(cat || cat >/dev/null) 2>&1
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/environment.sh"
export RUN_COMMAND=$(printf '%q ' ./run.sh "$@")   # for compare.py
export RUN_DATE=$(date +%F)   # one folder for all runs, if midnight passes
script='' against='' name='' preset=${gpu:+record} data='' tiny='' runs=1 seed=0 args=()
while (( $# )); do
    if [[ $1 =~ ^--(runs|seed|preset|data|against|name)$ ]]; then set -- "$1=${2-}" "${@:3}"; fi
    [[ ! $1 =~ ^--[a-z-]+=$ ]] || die "${1%=} needs a value"
    case $1 in
        -h|--help) sed -n '2,/^$/s/^# \{0,1\}//p' run.sh; exit ;;
        --check|--check=*) die "only python train_gpt.py takes --check" ;;
        --tiny) tiny="length=0.05 warmup=false val_slices=4 samples=1" ;;
        --runs=*|--seed=*|--preset=*|--data=*|--against=*|--name=*) declare "${1#--}" ;;
        data=?*|--set=data=?*) data=${1##*data=} args+=("$1") ;;   # as --data
        [!-]*.py) [[ ! $script ]] || die "name one script, not $script and $1"; script=$1 ;;
        *) args+=("$1") ;;
    esac
    shift
done
script=${script:-train_gpt.py}
[[ -f $script ]] || die "there is no $script in $PWD"
[[ $runs =~ ^[1-9][0-9]{0,5}$ ]] || die "--runs must be a whole number from 1 on, not '$runs'"
[[ $runs == 1 || " ${args[*]}" != *' --'@(save|resume)* ]] || die "--save and --resume need --runs 1"
[[ $seed =~ ^(0|[1-9][0-9]{0,8})$ ]] || die "--seed must be a whole number of at most 9 digits, not '$seed'"
processes=${NPROC_PER_NODE:-2}
[[ $processes =~ ^[1-9][0-9]{0,3}$ ]] || die "NPROC_PER_NODE must be a number from 1 on, not '$processes'"
preset=${preset:-cpu}
[[ $preset == record ]] || export CUDA_VISIBLE_DEVICES='' gpu=''
[[ $name/ != */baseline/* ]] || die "--name $name: only --against makes a baseline/; give another name"
[[ ! $tiny || ! $against ]] || name=''   # a rehearsal
if [[ $tiny ]]; then   # it stays short
    for i in "${!args[@]}"; do
        [[ ! ${args[i]} =~ ^(--set=)?length=[^\ ]*$ ]] || args[i]=${BASH_REMATCH[1]}length=0.05
    done
fi
same=(${tiny:+--set $tiny} --preset="$preset" ${data:+--data="$data"})
args=("${same[@]}" ${name:+--name="$name"} "${args[@]}")   # the user's --set is the last
if [[ $against ]]; then
    [[ -f $against ]] || die "--against: there is no $against in $PWD"
    [[ "${args[*]}" != *--@(resume|save|profile|checkpoint-every)* ]] ||
        die "--against goes without --resume, --save, --profile and --checkpoint-every"
fi
if [[ $against && ! $tiny ]]; then
    [[ $name ]] || die "--against needs a --name, of the new folder for the logs"
    if [[ -e .git ]] || git rev-parse >/dev/null 2>&1; then   # git itself says what it lacks
        committed=$(git -C "$(dirname -- "$script")" rev-parse "HEAD:./$(basename -- "$script")") &&
            [[ $committed == "$(git hash-object --no-filters -- "$script")" ]] ||
            die "commit $script first: a record's logs name a commit that has its script"
        git cat-file -e "$(git hash-object -- "$against")" 2>/dev/null ||
            die "--against: commit $against, too, or take one from a commit: git show COMMIT:train_gpt.py"
    fi
    [[ " ${args[*]}" == *' --set'* ]] || ! cmp -s "$script" "$against" ||
        die "$script and $against are the same"
fi
if [[ $name && ( $runs -gt 1 || $against ) ]]; then   # a table follows
    for folder in records/*/; do
        [[ ! -e "$folder${RUN_DATE}_$name" ]] ||
            die "$folder${RUN_DATE}_$name is there; remove it, or give another --name"
    done
fi

child='' claimed=''
at_end() { set +e; kill $child; rmdir "$claimed"; } 2>/dev/null   # a folder that has a log stays
trap at_end EXIT

train() {   # SCRIPT OPTION...: as a job with its own process group, so that Ctrl-C ends only this shell
    say "$1, preset $preset, seed $seed, $processes processes, python $python"
    set -m
    "${tied[@]}" "$python" -m torch.distributed.run --standalone --local_addr=localhost --no-python \
        --nproc_per_node="$processes" "${tied[@]}" "$python" -u "$1" --seed="$seed" "${@:2}" </dev/null &
    set +m
    [[ ${tied[0]} == setpriv ]] || child=$!   # torchrun then ends its processes
    wait $! || { local status=$?; say "$1 failed; its error is above the line of ===" >&2; exit $status; }
}

say "checking Python, the options and the data"
modules=()
[[ $data || $preset == cpu ]] || modules=(tiktoken huggingface_hub)   # to get the data
find_environment "${modules[@]}"
if [[ $gpu ]]; then
    works 'import triton; triton.runtime.driver.active.get_current_device()' ||
        die "Triton: $problem; it needs a C compiler and Python.h (Debian: gcc python3-dev)"
    gpus=$("$python" -c 'import torch; print(max(n for n in (1, 2, 4, 8) if n <= torch.cuda.device_count()))')
    processes=${NPROC_PER_NODE:-$gpus}
else   # large pages: fewer page faults, and address translations that fit in the CPU's tables
    export GLIBC_TUNABLES=${GLIBC_TUNABLES-glibc.malloc.hugetlb=1}
    : "${OMP_NUM_THREADS:=$(( ($(getconf _NPROCESSORS_ONLN) - 1) / processes + 1 ))}"
fi
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# The processes meet at the loopback interface, because the machine's name may have no address.
if [[ $(uname) == Linux ]]; then export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-lo}; fi
[[ ! $against || $tiny ]] || works 'import scipy' || die "compare.py needs scipy: $problem"
track_of() {   # SCRIPT OPTION...: checks options; early records' scripts have no --check, or name no track
    ! grep -q '"--check"' "$1" ||
        "${tied[@]}" "$python" "$@" --check "$processes" | sed -n 's/.* on the track //p'
}
track=$(track_of "$script" "${args[@]}")
if [[ $against && ! $tiny ]]; then
    before=$(track_of "$against" "${same[@]}")
    # An older script's --check names no validation, or no track.
    [[ $track$before == *\;*\;* ]] || { track=${track%;*} before=${before%;*}; }
    [[ ! $track || ! $before || $track == "$before" ]] ||
        die "$script has the track $track, but $against $before: a race keeps data and validation"
    [[ $track != other* ]] || say "these runs can be compared, but the track 'other' holds no record"
fi
declare -A sources=([cpu]="local_corpus.py" [words]="local_corpus.py --encoding gpt2")
[[ $data ]] || "${tied[@]}" "$python" data/${sources[$preset]:-fineweb.py}
if [[ $name && $track && ( $runs -gt 1 || $against ) ]]; then   # another may have taken the name just now
    track=${track%;*}
    folder=records/$track/${RUN_DATE}_$name
    mkdir -p "records/$track"
    mkdir "$folder" && claimed=$folder || die "give another --name"
fi
for (( end = seed + runs; seed < end; seed++ )); do
    train "$script" "${args[@]}"
    [[ ! $against ]] || train "$against" "${same[@]}" ${name:+--name="$name/baseline"}
done
[[ ! $tiny ]] || say "--tiny: $script ${against:+and $against }ran; the loss after so few steps means nothing"
if [[ $name && ( $runs -gt 1 || $against ) ]]; then
    folder=$(ls -td records/*/"${RUN_DATE}_$name" | head -n 1)
    log=$(ls "$folder"/seed*.txt | head -n 1)
    [[ ! $against ]] ||
        "${tied[@]}" "$python" records/referee.py "$script" --preset "$preset" --log "$log" || true
    "$python" records/compare.py --begin "$folder"
fi
