# What run.sh and test.sh share; they source it.

caller=$PWD
unset PYTHONSAFEPATH   # programs import what is in their own folder
CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")"

say() { echo "$(basename "$0"): $*"; }
die() { say "$*" >&2; exit 1; }
from_caller() { if [[ $1 == /* || $caller -ef . ]]; then echo "$1"; else echo "$caller/$1"; fi; }   # a path

whole() {   # NAME VALUE LOWEST HIGHEST: prints VALUE, read as decimal; from 2^63 on it is negative
    [[ $2 =~ ^0*[0-9]{1,19}$ ]] && (( 10#$2 >= $3 && 10#$2 <= $4 )) ||
        die "$1 must be a whole number from $3 to $4, not '$2'"
    echo $(( 10#$2 ))
}

# Python code that takes the current folder off the path: a random.py there would replace the module random
isolated='import sys; sys.path = [p for p in sys.path if p]; '
module=$isolated'import runpy; runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)'
works() { problem=$("$python" -c "$isolated$1" 2>&1 | tail -n 1); }   # CODE: otherwise `problem` says why
pip_install() { "$python" -c "$module" pip install -qq --disable-pip-version-check "$@"; }

gpus=$(nvidia-smi -L 2>/dev/null | grep '^GPU ' || true)
if [[ $gpus && ${CUDA_VISIBLE_DEVICES+set} ]]; then gpus=$(tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES"); fi
count=$(grep -c '^[^-]' <<<"$gpus" || true)
for gpus in 8 4 2 1 0; do (( gpus > count )) || break; done

suitable() {   # imports for real, since a broken installation has a version too
    works "import huggingface_hub, numpy, tiktoken, torch, tqdm
unfit = [int(n) for n in torch.__version__.split('.')[:2]] < [2, 11] or $gpus and not torch.version.cuda
sys.exit(unfit and f'torch {torch.__version__} is older than 2.11, or lacks CUDA')"
}

find_environment() {   # sets `python` to one that can train here; makes .venv if there is none
    local stamp=.venv/installed-requirements.txt
    python=$(cd "$caller" && command -v "${PYTHON:-python3}") || die "there is no ${PYTHON:-python3}"
    python=$(from_caller "$python")
    if suitable; then return; fi
    export PIP_USER=0 PIP_TARGET= PIP_PREFIX=   # whatever pip is configured for, packages go into .venv
    if ! cmp -s requirements.txt "$stamp"; then
        "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
            die "$python is older than Python 3.10"
        say "making .venv, which takes minutes, because $python cannot train here: $problem"
        "$python" -c "$module" venv --clear .venv
        python=.venv/bin/python
        if (( ! gpus )); then   # the build for CPUs is much smaller, but not in every package index
            pip_install --timeout 5 --retries 0 --no-deps --index-url https://download.pytorch.org/whl/cpu \
                "$(grep '^torch==' requirements.txt)" 2>/dev/null || true
        fi
        pip_install -r requirements.txt
        cp requirements.txt "$stamp"   # last, so that an interrupted installation is done again
    fi
    python=$PWD/.venv/bin/python
    suitable || die ".venv cannot train here: $problem; remove .venv, or set PYTHON"
}
