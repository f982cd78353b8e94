"""Tests data/fineweb.py against a fake hub: whatever goes wrong, only complete shards get a shard's name."""

import hashlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import fineweb
from hub import Hub
from launch import WAIT
from tokenize_text import VOCABULARY, shard_header

SCRIPT = Path(fineweb.__file__).resolve()
VAL = "fineweb_val_000000.bin"
TRAIN = [f"fineweb_train_{i:06d}.bin" for i in range(1, 10)]
CHUNK = 10 << 20  # the hub's client writes chunks of this size; a killed process leaves none smaller


def shard(tokens, declared=None):
    return shard_header(declared or len(tokens)) + np.asarray(tokens, "<u2").tobytes()


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
LINES = [f"{i:02x}\n" for i in range(256)] + [f"{i:06x}\n" for i in range(256, 50256)]
TOKEN_BYTES = "".join(LINES) + "\n"  # BOS has none
LARGE = shard(np.arange(CHUNK * 5 // 4) % 50257)  # 2.5 chunks


@pytest.fixture
def hub():
    with Hub(shards(1)) as hub:
        yield hub


def start(hub, out, *arguments, **settings):
    environment = {"HF_ENDPOINT": f"http://127.0.0.1:{hub.port}", "HF_HOME": f"{out.parent}/hf"}
    environment |= {"HF_HUB_OFFLINE": "0", "NO_PROXY": "*", "no_proxy": "*", "PYTHONUNBUFFERED": ""}
    command = [sys.executable, "-c", WITH_STAND_IN, SCRIPT, "--out", out]
    command += map(str, arguments)
    return subprocess.Popen(
        command,
        env=os.environ | environment | settings,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # A shell starts background jobs, and so their children, with SIGINT ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def fetch(hub, out, *arguments, status=0, **settings):
    """Runs fineweb.py to its end. Returns stdout and stderr."""
    hub.requests.clear()
    process = start(hub, out, *arguments, **settings)
    try:
        printed = process.communicate(timeout=WAIT)
    finally:
        process.kill()
    assert process.returncode == status, printed
    return printed


def contents(out):
    """Returns all files but the vocabulary, which has a test of its own."""
    return {path.name: path.read_bytes() for path in out.iterdir() if path.name != VOCABULARY}


def first_line(error):
    """Returns an error's first line, which has the fix; another may tell how to do without a network."""
    first = error.removesuffix(f"{fineweb.WITHOUT_NETWORK}\n").rstrip("\n")
    assert re.fullmatch(r"fineweb\.py: .*\. Start it again: it continues where it stopped\.", first), error
    return first


# ---- Complete and broken files -----------------------------------------------------------------------------


def test_a_shard_is_written_through_a_link(hub, tmp_path):
    out = tmp_path / "out"
    other_disk = tmp_path / "other"
    out.mkdir()
    other_disk.mkdir()
    (out / VAL).symlink_to(other_disk / VAL)
    fetch(hub, out, 0)
    assert (out / VAL).is_symlink()
    assert contents(other_disk) == {VAL: hub.files[VAL]}


def test_a_users_vocabulary_is_named_before_any_download(hub, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / VOCABULARY).write_text("a word of mine\n")
    _, error = fetch(hub, out, 0, status=1)
    assert f"{VOCABULARY}: another kind of file is there" in first_line(error)
    assert (out / VOCABULARY).read_text() == "a word of mine\n" and not hub.requests and not contents(out)


def test_a_folder_with_other_shards_is_named_before_any_download(hub, tmp_path):
    """Training would read both texts."""
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine_train_000001.bin").write_bytes(shard([256, 1]))
    _, error = fetch(hub, out, 0, status=1)
    assert "already has shards (mine_train_000001.bin)" in first_line(error)
    assert not hub.requests and list(contents(out)) == ["mine_train_000001.bin"]


def test_nine_shards_are_the_default_and_a_second_start_downloads_nothing(hub, tmp_path):
    out = tmp_path / "deep" / "out"
    hub.files = shards(9)
    printed, error = fetch(hub, out)
    assert contents(out) == hub.files and error == "" and len(printed.splitlines()) == 10 + 2
    assert sorted(hub.requests) == sorted((name, None) for name in hub.files)
    hub.heads.clear()
    again, error = fetch(hub, out)
    assert printed.endswith(f"\n{again}") and hub.requests == hub.heads == []


BROKEN = [
    b"\1" + shard([1])[1:],  # magic number
    shard([1, 2], declared=3),
    shard([1, 2], declared=1),
    shard([1, 50257]),  # token
]


def test_missing_and_broken_shards_are_downloaded_four_at_a_time(hub, tmp_path):
    hub.files = shards(6)
    for name, content in zip(TRAIN, BROKEN):
        (tmp_path / name).write_bytes(content)
    for name in (VAL, TRAIN[4]):
        (tmp_path / name).write_bytes(hub.files[name])
    hub.gather = threading.Barrier(4, timeout=WAIT)  # no response before four requests
    printed, _ = fetch(hub, tmp_path, 5)
    assert sorted(re.findall("^(.*): removing", printed, re.M)) == TRAIN[:4]
    assert sorted(hub.requests) == [(name, None) for name in TRAIN[:4]]
    assert contents(tmp_path) == shards(5)


def test_a_download_must_have_the_checksum(hub, tmp_path):
    """Also one that continues a damaged file, as after a power cut: its length is right, its tokens not."""
    tag = hashlib.sha256(hub.files[VAL]).hexdigest()[:16]
    whole = len(hub.files[VAL])
    (tmp_path / f"{VAL}.{tag}.tmp").write_bytes(hub.files[VAL][:-2] + b"\1")
    for asked in (f"bytes={whole - 1}-", None):
        _, error = fetch(hub, tmp_path, 0, status=1)
        assert "its checksum is not the hub's" in first_line(error)
        assert contents(tmp_path) == {} and hub.requests == [(VAL, asked)]
        hub.etags[VAL] = "0" * 64
    hub.etags[VAL] = "of another kind"
    fetch(hub, tmp_path, 0)
    assert contents(tmp_path) == shards(0)


# ---- The vocabulary ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("before", (None, "00\n" * 257))
def test_complete_shards_get_the_vocabulary_that_they_lack(hub, tmp_path, before):
    """As in a folder of an earlier version."""
    (tmp_path / VAL).write_bytes(hub.files[VAL])
    if before is not None:
        (tmp_path / VOCABULARY).write_text(before)
    fetch(hub, tmp_path, 0)
    assert (tmp_path / VOCABULARY).read_text() == TOKEN_BYTES and hub.requests == []


# ---- Partial downloads -------------------------------------------------------------------------------------


def start_and_hold(hub, out, how="hold"):
    """Starts a process that has the first shard and one chunk of the second, and waits for more.

    Returns the process, and the name of the file with that chunk.
    """
    hub.files[TRAIN[0]] = LARGE
    hub.breaks[TRAIN[0]] = [(CHUNK * 3 // 2, how)]
    process = start(hub, out, 1)
    end = time.monotonic() + WAIT
    while [path.stat().st_size for path in out.glob(f"{TRAIN[0]}.*.tmp")] != [CHUNK]:
        assert time.monotonic() < end
        time.sleep(0.01)
    return process, next(out.glob("*.tmp")).name


@pytest.mark.slow
@pytest.mark.parametrize("number, status", ((signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, 130)))
def test_a_stopped_download_continues_where_it_stopped(hub, tmp_path, number, status):
    process, part = start_and_hold(hub, tmp_path)
    process.send_signal(number)
    _, error = process.communicate(timeout=WAIT)  # though no more arrives
    assert process.returncode == status
    if number == signal.SIGINT:
        assert "interrupted" in first_line(error)
    else:
        assert error == ""
    assert contents(tmp_path) == {VAL: hub.files[VAL], part: LARGE[:CHUNK]}
    fetch(hub, tmp_path, 1)
    assert hub.requests == [(TRAIN[0], f"bytes={CHUNK}-")] and contents(tmp_path) == hub.files


@pytest.mark.slow
def test_a_reset_connection_is_resumed_if_anything_arrived(hub, tmp_path):
    process, _ = start_and_hold(hub, tmp_path, "reset")
    hub.release.set()
    process.communicate(timeout=WAIT)
    assert process.returncode == 0 and hub.requests[1:] == [(TRAIN[0], None), (TRAIN[0], f"bytes={CHUNK}-")]
    assert contents(tmp_path) == hub.files
    (tmp_path / VAL).unlink()
    hub.breaks[VAL] = [(100, "reset")]
    _, error = fetch(hub, tmp_path, 0, status=1)
    assert "reset" in first_line(error).lower()


def test_one_failure_ends_all_downloads(hub, tmp_path):
    hub.files = shards(3)
    del hub.files[TRAIN[1]]
    hub.breaks[TRAIN[0]] = [(4, "hold")]
    hub.breaks[TRAIN[2]] = [(4, "hold")]
    (tmp_path / TRAIN[1]).write_bytes(BROKEN[1])  # is removed first
    _, error = fetch(hub, tmp_path, 3, status=1)
    assert "404" in first_line(error) and TRAIN[1] in first_line(error)
    assert [name for name in contents(tmp_path) if name.endswith(".bin")] == [VAL]


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
    _, error = fetch(hub, tmp_path, 0, status=1, **settings)
    assert re.fullmatch(f"fineweb.py: .*{name}: .*\n", error) and hub.heads == []
