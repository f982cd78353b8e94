# What run.sh and test.sh share; they source it.

unset PYTHONSAFEPATH   # programs import what is in their own folder
unset GIT_DIR GIT_WORK_TREE GIT_INDEX_FILE   # of a hook that runs this: git would look into its repository
unset "${!PET_@}"   # torchrun's options; with PET_NNODES=2 it would wait for another machine
CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")"

say() { echo "$(basename "$0"): $*"; }
die() { say "$*" >&2; exit 1; }
works() {   # CODE, which imports nothing of this folder; if it fails, `problem` says why
    problem=$(PYTHONSAFEPATH=1 "$python" -c "$1" 2>&1 | tail -n 1)
}
pip_install() { "${tied[@]}" "$python" -m pip install -qq --disable-pip-version-check "$@"; }

# Begins commands which the kernel kills when this shell ends, even if it is killed. Linux only.
tied=(setpriv --pdeathsig KILL)
"${tied[@]}" true 2>/dev/null || tied=(env)

gpu=''   # or `yes`
if [[ $(nvidia-smi -L 2>/dev/null) == "GPU "* && ! ${CUDA_VISIBLE_DEVICES-0} =~ ^(-1)?$ ]]; then gpu=yes; fi

suitable() {   # MODULE...: imports for real, since a broken installation has a version, too
    works "import sys$(printf ', %s' numpy torch tqdm "$@")
if [int(n) for n in torch.__version__.split('.')[:2]] < [2, 11] or '$gpu' and not torch.version.cuda:
    sys.exit(f'torch {torch.__version__} is older than 2.11, or lacks CUDA')"
}

find_environment() {   # MODULE...: sets `python` to one with numpy, torch, tqdm and these; makes .venv if needed
    python=$(command -v "${PYTHON:-python3}") || die "there is no ${PYTHON:-python3}"
    if suitable "$@"; then return; fi
    exec {lock}<requirements.txt
    flock "$lock"   # another may be making it
    if ! cmp -s requirements.txt .venv/installed-requirements.txt; then
        "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
            die "$python is older than Python 3.10"
        [[ ! -L .venv && ( ! -e .venv || -e .venv/installed-requirements.txt ) ]] ||
            die "$python cannot train here: $problem; remove .venv, which is not of this script, or set PYTHON"
        say "making .venv, which takes minutes, because $python cannot train here: $problem"
        "${tied[@]}" "$python" -m venv --clear .venv
        touch .venv/installed-requirements.txt   # so that it is known as of this script
        python=.venv/bin/python
        export PIP_USER=0 PIP_TARGET= PIP_PREFIX=   # whatever pip is configured for, packages go into .venv
        cpu=(--timeout 5 --retries 0 --no-deps --index-url https://download.pytorch.org/whl/cpu)
        [[ $gpu ]] || pip_install "${cpu[@]}" "$(grep ^torch== requirements.txt)" 2>/dev/null ||
            say "no torch for CPUs from download.pytorch.org; getting the usual one, with 2 GB of CUDA"
        pip_install -r requirements.txt
        cp requirements.txt .venv/installed-requirements.txt   # last: an interrupted one is made again
    fi
    exec {lock}<&-
    python=$PWD/.venv/bin/python
    suitable "$@" || die ".venv cannot train here: $problem; remove .venv, or set PYTHON"
}
