#!/usr/bin/env bash
# ./run.sh [SCRIPT.py] [--runs N] [the script's options]
#
# Trains, on a fresh machine too: finds or makes a Python environment, fetches or builds the data, and starts
# SCRIPT.py (default: train_gpt.py) under torchrun.
#
#   GPUs found    the largest of 8, 4, 2, 1 of them, FineWeb, preset `record`
#   none found    2 processes, the built-in corpus, preset `cpu`
#
#   --preset P    decides instead; `cpu` means the built-in corpus, anything else FineWeb
#   --data DIR    train on the shards in DIR; nothing is fetched
#   --runs N      N runs, with seeds S..S+N-1 (S from --seed, default 0); --name NAME collects them in a record folder,
#                 and ends with their table, from which that folder's README.md begins
#
# PYTHON (default: python3) names the interpreter. It is used as it is if it has torch 2.11 or newer, numpy, tiktoken,
# huggingface_hub and tqdm; if not, .venv is made with it. CUDA_VISIBLE_DEVICES limits the GPUs.

set -euo pipefail

say() { echo "$(basename "$0"): $*"; }
die() { echo "$(basename "$0"): $*" >&2; exit 1; }

# Makes a path of the caller's folder one that holds in the repository's.
from_caller() {
    if [[ $1 == /* || $caller == "$repository" ]]; then echo "$1"; else echo "$caller/$1"; fi
}

# Counts the GPUs that nvidia-smi lists and CUDA_VISIBLE_DEVICES leaves visible.
count_gpus() {
    local listed visible
    listed=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ' || true)
    if [[ -n ${CUDA_VISIBLE_DEVICES+set} ]]; then
        visible=$(tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -cv -e '^-' -e '^ *$' || true)
        (( visible < listed )) && listed=$visible
    fi
    echo "$listed"
}

# suitable PYTHON GPUS: succeeds if it can train here. Imports for real: broken installations have versions too.
suitable() {
    "$1" - "$2" >/dev/null 2>&1 <<'PY'
import sys
import huggingface_hub, numpy, tiktoken, torch, tqdm
new_enough = tuple(int(n) for n in torch.__version__.split(".")[:2]) >= (2, 11)
sys.exit(not (new_enough and (torch.version.cuda or sys.argv[1] == "0")))
PY
}

# pip_install PYTHON ARGUMENT...
pip_install() { "$1" -m pip install -qq --disable-pip-version-check "${@:2}"; }

# find_environment GPUS: sets `python` to an interpreter that can train, making .venv where there is none.
find_environment() {
    local gpus=$1 stamp=.venv/installed-requirements.txt
    python=$(command -v "$interpreter") || die "no $interpreter here: install Python 3.10 or newer, or set PYTHON"
    if suitable "$python" "$gpus"; then
        say "using $python, which has all that is needed"
        return
    fi
    # The stamp is the last thing written, so that an interrupted installation is completed next time.
    if [[ -x .venv/bin/python ]] && cmp -s requirements.txt "$stamp" && suitable .venv/bin/python "$gpus"; then
        python=$PWD/.venv/bin/python
        say "using .venv"
        return
    fi
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
        die "$python is $("$python" -V 2>&1): Python 3.10 or newer is needed; set PYTHON to one"
    # An environment that was complete and cannot train (its torch lacks CUDA, say) is not repaired in place.
    if ! .venv/bin/python -m pip --version >/dev/null 2>&1 ||
            { [[ -e $stamp ]] && ! suitable .venv/bin/python "$gpus"; }; then
        say "making .venv with $python ($("$python" -V 2>&1))"
        "$python" -m venv --clear .venv >/dev/null ||
            die "'$python -m venv' failed (on Debian and Ubuntu: apt install python3-venv); or set PYTHON to another Python"
    else
        say "completing .venv"
    fi
    python=$PWD/.venv/bin/python
    # torch alone and first: pip could otherwise choose gigabytes of another version.
    local torch installed=''
    torch=$(grep '^torch==' requirements.txt)
    if (( gpus == 0 )); then
        say "installing $torch, the build for CPU from download.pytorch.org if it can be reached"
        pip_install "$python" --timeout 5 --retries 0 --no-deps \
            --index-url https://download.pytorch.org/whl/cpu "$torch" 2>/dev/null && installed=yes
    fi
    if [[ ! $installed ]]; then
        say "installing $torch from the default package index"
        pip_install "$python" "$torch" || die "pip could not install $torch (see above); start again to retry"
    fi
    say "installing the other requirements"
    pip_install "$python" -r requirements.txt || die "pip could not install them (see above); start again to retry"
    suitable "$python" "$gpus" ||
        die ".venv cannot train here: its torch fails to import, or there are GPUs and it is built without CUDA;" \
            "remove .venv and start again, or set PYTHON to a Python with a suitable torch"
    cp requirements.txt "$stamp"
}

caller=$PWD
repository=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cd "$repository"
interpreter=${PYTHON:-python3}
if [[ $interpreter == */* ]]; then interpreter=$(from_caller "$interpreter"); fi
if [[ ${BASH_SOURCE[0]} != "$0" ]]; then return; fi   # test.sh reads this file for the functions above

# ---- Options: --runs is run.sh's; of the script's it needs a few --------------------------------------------------

given=$(printf ' %q' "$@")
script=train_gpt.py
if [[ ${1-} == *.py ]]; then
    script=$(from_caller "$1")
    shift
fi
[[ -f $script ]] || die "$script: no such file"

preset='' data='' seed='' runs='' name='' resume='' hint='' help=''
args=()
while (( $# )); do
    option=$1; shift
    case $option in
        --runs=*|--seed=*|--name=*|--preset=*|--data=*|--save=*|--resume=*) value=${option#*=}; option=${option%%=*} ;;
        --runs|--seed|--name|--preset|--data|--save|--resume)
            (( $# )) || die "$option needs a value"
            value=$1; shift ;;
        -h|--help) help=1; continue ;;
        --check|--check=*) die "$option is for the script, which is asked so before every run: python $script $option N" ;;
        --checkpoint-every|--checkpoint-every=*)
            hint='; if it wrote a checkpoint, --resume LOG_FOLDER continues from it'
            args+=("$option"); continue ;;
        *) args+=("$option"); continue ;;
    esac
    case $option in
        --runs)   runs=$value ;;
        --seed)   seed=$value ;;
        --name)   name=$value; args+=(--name "$name") ;;
        --preset) preset=$value ;;
        --data)   data=$(from_caller "$value"); args+=(--data "$data") ;;
        --save)   args+=(--save "$(from_caller "$value")") ;;
        --resume) resume=1; args+=(--resume "$(from_caller "$value")") ;;
    esac
done
gpus=$(count_gpus)

if [[ $help ]]; then
    sed -n '2,/^$/s/^# \{0,1\}//p' run.sh
    for candidate in "$interpreter" .venv/bin/python; do
        if suitable "$candidate" 0; then
            echo "The script's own options:"
            exec "$candidate" "$script" --help
        fi
    done
    echo "(The options of $script are shown here once the Python environment is made.)"
    exit
fi
if [[ $runs ]]; then
    [[ $runs =~ ^[1-9][0-9]*$ ]] || die "--runs needs a positive number, not '$runs'"
    [[ ${seed:-0} =~ ^[0-9]+$ ]] || die "--seed needs a number, not '$seed'"
    [[ ! $resume ]] || die "--resume continues a single run; leave out --runs"
fi

# ---- Environment, data, processes --------------------------------------------------------------------------------

find_environment "$gpus"
if [[ $runs && $name ]] && ! "$python" -c 'import importlib.util as i, sys; sys.exit(not i.find_spec("scipy"))'; then
    die "the runs' table needs scipy, which $python lacks: install it there ('-m pip install scipy'), or leave out --name"
fi
if (( gpus )); then
    preset=${preset:-record}
    for processes in 8 4 2 1; do (( processes <= gpus )) && break; done
else
    preset=${preset:-cpu}
    processes=2
    cores=$(getconf _NPROCESSORS_ONLN)
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(( cores > processes ? cores / processes : 1 ))}
fi
# Lets the script check options and machine before a download. Scripts of earlier records lack --check. Captured, so
# that Ctrl-C shows no traceback of imports.
if grep -q -e '"--check"' "$script"; then
    refusal=$("$python" "$script" --preset "$preset" ${seed:+--seed "$seed"} ${args[@]+"${args[@]}"} --check "$processes" \
              2>&1 >/dev/null) || { echo "$refusal" >&2; exit 1; }
fi
if [[ $data ]]; then
    say "data: $data"
elif [[ $preset == cpu ]]; then
    say "data: the built-in corpus"
    "$python" data/local_corpus.py
else
    say "data: FineWeb, downloading what is missing"
    "$python" data/fineweb.py
fi

# torchrun warns, on every rank, about each unset thread count and each host name that it cannot look up.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} TORCH_CPP_LOG_LEVEL=${TORCH_CPP_LOG_LEVEL:-ERROR}

# torchrun without its log, warnings and traceback: the processes report errors themselves, unless they are killed.
launcher='
import logging, signal, sys, tempfile, threading, traceback

logging.disable()
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main

def stop(number, frame):
    if any(caller.f_code.co_name == "_start_workers" for caller, line in traceback.walk_stack(frame)):
        threading.Timer(0.1, signal.raise_signal, [number]).start()  # torchrun would lose those it has just started
        return
    signal.signal(number, signal.SIG_IGN)  # a second one would cut short what the first began
    sys.exit(128 + number)                 # on the way out torchrun ends the processes: SIGTERM, after 30 s SIGKILL

signal.signal(signal.SIGTERM, stop)
for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):  # run.sh has them too, and passes them on as SIGTERM
    signal.signal(number, signal.SIG_IGN)
try:
    with tempfile.TemporaryDirectory() as tempfile.tempdir:  # torchrun leaves an empty folder there
        main(sys.argv[1:])
except ChildFailedError as error:
    # When one fails torchrun ends the others by SIGTERM. Of those that failed within the same two seconds (its clock
    # is no better), a killed one is the cause: the others lost their peer.
    began = min(failure.timestamp for failure in error.failures.values())
    rank, first = min(error.failures.items(), key=lambda item: (
        item[1].timestamp > began + 1, item[1].exitcode == -signal.SIGTERM, item[1].exitcode > 0))
    if first.exitcode > 0:
        sys.exit(first.exitcode)
    hint = "; the machine may have run out of memory" if first.exitcode == -signal.SIGKILL else ""
    print(f"run.sh: rank {rank} was killed by {first.signal_name()}{hint}", file=sys.stderr)
    sys.exit(128 - first.exitcode)
'

# train ARGUMENT...: one run, in the background, since bash handles no signal before a foreground program ends. Ctrl-C
# does not reach the background: `stop` passes every signal on, as SIGTERM.
running='' stopped=''
stop() {
    stopped=$1
    [[ ! $running ]] || kill -TERM "$running" 2>/dev/null || true
}
train() {
    local code=0 what
    # torchrun must handle no signal itself: a second one could make it leave processes behind, and it undoes nohup.
    "$python" -W ignore -c "$launcher" --standalone --nproc_per_node="$processes" --signals-to-handle= \
        "$script" --preset "$preset" "$@" ${args[@]+"${args[@]}"} &   # bash 3.2 (macOS) takes an empty array for an unset one
    running=$!
    [[ ! $stopped ]] || stop "$stopped"   # the signal came before there was something to stop
    wait "$running" 2>/dev/null || code=$?     # bash would print the whole command if it is killed
    while kill -0 "$running" 2>/dev/null; do   # a signal to us ended the wait
        wait "$running" 2>/dev/null || code=$?
    done
    running=''
    if [[ ! $stopped ]] && (( code == 0 )); then return; fi

    what="training failed (exit code $code)"
    if [[ $stopped ]] || (( code == 130 || code == 143 )); then what=interrupted; fi
    echo "run.sh: $what; its log, if it began one, lacks 'complete: yes' and does not count$hint" >&2
    if [[ $stopped ]]; then   # dies of the signal: a loop around run.sh ends only then
        trap - "$stopped"
        kill -s "$stopped" $$
    fi
    exit "$code"
}
for signal in HUP INT QUIT TERM; do trap "stop $signal" "$signal"; done

# logs_of SEED: lists the logs in record folders of this name, of any track and day.
logs_of() { compgen -G "records/*/????-??-??_$name/seed$1_*.txt" || true; }

# collect BEFORE SEED: sets `record` to the folder of the log that was not in BEFORE. The script names it by the day; a
# log from after midnight moves to the first one's folder.
collect() {
    local log folder
    log=$(logs_of "$2" | grep -vxF -e "$1" | tail -n 1 || true)
    [[ $log ]] || die "the run is over, but there is no new log records/*/*_$name/seed$2_*.txt"
    folder=$(dirname "$log")
    record=${record:-$folder}
    if [[ $folder != "$record" ]]; then
        mv -n "$log" "$record/"
        rmdir "$folder" 2>/dev/null || true   # it may hold other runs
        say "the log is now in $record, with the first one"
    fi
}

# report: prints the table of the runs in `record`, and begins its README.md if there is none.
report() {
    local table code=0
    table=$("$python" records/compare.py "$record") || code=$?
    printf '\n%s\n\n' "$table"
    (( code == 0 )) || die "the runs are complete, but not their table: see above, then '$python records/compare.py $record'"
    if [[ -e $record/README.md ]]; then
        say "$record/README.md was there, and is left as it is"
        return
    fi
    {
        printf '# %s\n\n' "$name"
        printf '(What was changed, against which record, and why.)\n\n    ./run.sh%s\n\n' "$given"
        printf 'What `python records/compare.py %s` prints:\n\n' "$record"
        sed 's/^./    &/' <<<"$table"
    } >"$record/README.md"
    say "$record/README.md begins with this table; say in it what was changed"
}

where="$processes process$( (( processes == 1 )) || echo es ) on $( (( gpus )) && echo "$processes of $gpus GPUs" || echo CPU)"
if [[ $runs ]]; then
    record=''
    for (( i = 0; i < runs; i++ )); do
        number=$((10#${seed:-0} + i))
        say "run $((i + 1)) of $runs: $(basename "$script"), preset $preset, seed $number, $where"
        before=$(logs_of $number)
        train --seed $number
        [[ ! $name ]] || collect "$before" $number
    done
    [[ ! $name ]] || report
else
    say "$(basename "$script"), preset $preset, $where"
    train ${seed:+--seed "$seed"}
fi
