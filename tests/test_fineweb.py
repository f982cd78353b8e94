"""Tests data/fineweb.py against a fake hub: whatever goes wrong, only complete shards get a shard's name."""

import hashlib
import os
import re
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import fineweb
from hub import Hub
from launch import WAIT
from tokenize_text import VOCABULARY, shard_header

VAL = "fineweb_val_000000.bin"
TRAIN = [f"fineweb_train_{i:06d}.bin" for i in range(1, 10)]
CHUNK = 10 << 20  # the hub's client writes chunks of this size; a killed process leaves none smaller


def shard(tokens):
    return shard_header(len(tokens)) + np.asarray(tokens, "<u2").tobytes()


def shards(count):
    """Returns the validation shard and `count` for training, all different, with GPT-2's extreme tokens."""
    names = [VAL] + TRAIN[:count]
    return {name: shard([0, i, 50256]) for i, name in enumerate(names)}


# Runs a script with another encoding in place of GPT-2's, which would be downloaded.
WITH_STAND_IN = """
import os, runpy, sys
import tiktoken

def get_encoding(name):
    assert name == "gpt2"
    ranks = {bytes([i]): i for i in range(256)} | {i.to_bytes(3, "big"): i for i in range(256, 50256)}
    special = {"<|endoftext|>": 50256}
    return tiktoken.Encoding("gpt2", pat_str=".", mergeable_ranks=ranks, special_tokens=special)

tiktoken.get_encoding = get_encoding
sys.path.insert(0, os.path.dirname(sys.argv[1]))
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
LARGE = shard(np.arange(CHUNK * 5 // 4) % 50257)  # 2.5 chunks


@pytest.fixture
def hub():
    with Hub(shards(1)) as hub:
        yield hub


def start(hub, out, count=None, settings=()):
    """Starts fineweb.py for `count` training shards, or its default, with these variables."""
    environment = {"HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}", "HF_HOME": f"{out.parent}/hf"}
    environment |= {"HF_HUB_OFFLINE": "0", "NO_PROXY": "*", "no_proxy": "*"}
    command = [sys.executable, "-c", WITH_STAND_IN, fineweb.__file__, "--out", out]
    if count is not None:
        command.append(str(count))
    return subprocess.Popen(
        command,
        env=os.environ | environment | dict(settings),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # A shell starts background jobs, and so their children, with SIGINT ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def fetch(hub, out, count=None, settings=(), status=0):
    """Runs fineweb.py to its end. Returns stdout and stderr."""
    hub.requests.clear()
    process = start(hub, out, count, settings)
    try:
        printed = process.communicate(timeout=WAIT)
    finally:
        process.kill()
    assert process.returncode == status, printed
    return printed


def contents(out):
    """Returns all shards, also parts of them."""
    return {path.name: path.read_bytes() for path in out.glob("*.bin*")}


def failure(hub, out, count):
    """Runs fineweb.py, which must fail. Returns its error, without the hint for those without a network."""
    _, error = fetch(hub, out, count, status=1)
    first = error.splitlines()[0]
    assert re.fullmatch(r"fineweb\.py: .*\. Start it again: it continues where it stopped\.", first), error
    return first


# ---- Complete and broken files -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, problem",
    ((VOCABULARY, "another kind of file is there"), ("mine_train_000001.bin", "already has shards")),
)
def test_a_users_file_is_named_before_any_download(hub, tmp_path, name, problem):
    """Training would read shards of another text, too."""
    (tmp_path / name).write_text("a word of mine")
    error = failure(hub, tmp_path, 0)
    assert problem in error and name in error and not hub.requests
    assert os.listdir(tmp_path) == [name]


def test_nine_shards_are_the_default_and_a_second_start_downloads_nothing(hub, tmp_path):
    """But it replaces a vocabulary that is not GPT-2's. BOS, the last of it, has no bytes."""
    out = tmp_path / "deep" / "out"
    hub.files = shards(9)
    fetch(hub, out)
    assert contents(out) == hub.files
    assert sorted(hub.requests) == sorted((name, None) for name in hub.files)
    hub.heads.clear()
    (out / VOCABULARY).write_text("00\n" * 257)
    fetch(hub, out)
    assert hub.requests == hub.heads == []
    lines = (out / VOCABULARY).read_text().split("\n")
    assert len(lines) == 50258 and lines[255:257] == ["ff", "000100"] and lines[-2:] == ["", ""]


BROKEN = [
    b"\1" + shard([1])[1:],  # magic number
    shard([1, 2])[:-2],
    shard([1, 2]) + bytes(2),
    shard([1, 50257]),  # token
]


def test_broken_shards_are_downloaded_four_at_a_time(hub, tmp_path):
    """Also through a link."""
    hub.files = shards(4)
    (tmp_path / TRAIN[0]).symlink_to("disk")
    for name, content in zip(TRAIN, BROKEN):
        (tmp_path / name).write_bytes(content)
    (tmp_path / VAL).write_bytes(hub.files[VAL])
    hub.gather = threading.Barrier(4, timeout=WAIT)  # no response before four requests
    fetch(hub, tmp_path, 4)
    assert sorted(hub.requests) == [(name, None) for name in TRAIN[:4]]
    assert contents(tmp_path) == hub.files and (tmp_path / TRAIN[0]).is_symlink()


def test_a_download_must_have_the_checksum(hub, tmp_path):
    """Also one that continues a damaged file, as after a power cut: its length is right, its tokens not."""
    whole = hub.files[VAL]
    tag = hashlib.sha256(whole).hexdigest()[:16]
    (tmp_path / f"{VAL}.{tag}.tmp").write_bytes(whole[:-2] + b"\1")
    for asked in (f"bytes={len(whole) - 1}-", None):
        assert "its checksum is not the hub's" in failure(hub, tmp_path, 0)
        assert contents(tmp_path) == {} and hub.requests == [(VAL, asked)]
        hub.etags[VAL] = "0" * 64
    hub.etags[VAL] = "of another kind"
    fetch(hub, tmp_path, 0)
    assert contents(tmp_path) == shards(0)


# ---- Partial downloads -------------------------------------------------------------------------------------


def start_and_hold(hub, out, size):
    """Starts a process that waits for more of the first training shard when `size` bytes are there."""
    hub.breaks[TRAIN[0]] = CHUNK * 3 // 2
    process = start(hub, out, 1)
    end = time.monotonic() + WAIT
    while [path.stat().st_size for path in out.glob(f"{TRAIN[0]}.*.tmp")] != [size]:
        assert time.monotonic() < end
        time.sleep(0.01)
    return process


@pytest.mark.slow
def test_a_download_continues_where_it_stopped(hub, tmp_path):
    """When it was interrupted, and when the connection was reset; but not if nothing arrived before."""
    hub.files[TRAIN[0]] = LARGE
    process = start_and_hold(hub, tmp_path, CHUNK)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=WAIT)  # though no more arrives
    assert process.returncode == 130 and "interrupted. Start it again" in error
    process = start_and_hold(hub, tmp_path, 2 * CHUNK)
    hub.release.set()
    process.communicate(timeout=WAIT)
    assert process.returncode == 0 and contents(tmp_path) == hub.files
    asked = [None, f"bytes={CHUNK}-", f"bytes={2 * CHUNK}-"]
    assert hub.requests[1:] == [(TRAIN[0], each) for each in asked]
    (tmp_path / VAL).unlink()
    hub.breaks[VAL] = 100
    assert "reset" in failure(hub, tmp_path, 0).lower()


def test_one_failure_ends_all_downloads(hub, tmp_path):
    """Also those from which nothing more arrives."""
    hub.files = shards(2)
    del hub.files[TRAIN[1]]
    hub.breaks[TRAIN[0]] = 4
    assert re.search(f"404.*{TRAIN[1]}", failure(hub, tmp_path, 2))


SETTINGS = {
    "HF_HUB_DOWNLOAD_TIMEOUT": "abc",
    "HF_ENDPOINT": "localhost",
    "HF_TOKEN": "hf_\u00e9",
    "ALL_PROXY": "socks5://127.0.0.1:9",
    "https_proxy": "http://localhost:x",
    "SSL_CERT_FILE": "/none",
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_wrong_setting_is_named(hub, tmp_path, name):
    settings = {"NO_PROXY": "", "no_proxy": "", name: SETTINGS[name]}
    _, error = fetch(hub, tmp_path, 0, settings, status=1)
    assert re.fullmatch(f"fineweb.py: .*{name}: .*\n", error) and hub.heads == []
