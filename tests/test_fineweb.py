"""data/fineweb.py against a stand-in for the hub: whatever goes wrong, only whole shards have a shard's name."""
import fcntl
import hashlib
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from hub import Hub
from launch import WAIT

SCRIPT = Path(__file__).resolve().parent.parent / "data" / "fineweb.py"
sys.path.insert(0, str(SCRIPT.parent))
import fineweb  # noqa: E402

VAL, TRAIN = "fineweb_val_000000.bin", [f"fineweb_train_{i:06d}.bin" for i in range(1, 10)]
PIECE = 10 << 20   # the hub's client writes pieces of so many bytes, so less of a file does not outlive its process


def shard(tokens, *, magic=20240520, promised=None) -> bytes:
    header = np.zeros(256, "<i4")
    header[:3] = magic, 1, len(tokens) if promised is None else promised
    return header.tobytes() + np.asarray(tokens, "<u2").tobytes()


def shards(count: int) -> dict[str, bytes]:
    """The validation shard and `count` for training, each with tokens of its own, GPT-2's first and last among them."""
    return {name: shard([0, i, 50256]) for i, name in enumerate([VAL, *TRAIN[:count]])}


LARGE = shard(np.arange(PIECE * 5 // 4) % 50257)   # 2.5 pieces


@pytest.fixture
def hub():
    with Hub(shards(1)) as hub:
        yield hub


def start(hub, out, *arguments, **options) -> subprocess.Popen:
    settings = {"HF_ENDPOINT": f"http://127.0.0.1:{hub.port}", "HF_HOME": str(out.parent / "hf"), "HF_HUB_OFFLINE": "0",
                "NO_PROXY": "*", "no_proxy": "*", "PYTHONUNBUFFERED": ""}
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE,
               # a shell's background job is started with it ignored, and its children are too
               "preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)} | options
    return subprocess.Popen([sys.executable, SCRIPT, *map(str, arguments), "--out", out], env=os.environ | settings, text=True,
                            **options)


def fetch(hub, out, *arguments, status=0) -> tuple[str, str]:
    """Runs fineweb.py to its end; its output and its errors."""
    process = start(hub, out, *arguments)
    try:
        printed = process.communicate(timeout=WAIT)
    finally:
        process.kill()
    assert process.returncode == status, printed
    return printed


def there(out) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in out.iterdir()}


def one_line(error: str) -> str:
    assert re.fullmatch(r"fineweb\.py: [^\n]*\. Start it again: it continues where it stopped\.\n", error), error
    return error


# ---- What arrives ------------------------------------------------------------------------------------------------

def test_nine_shards_are_the_default_and_a_second_start_asks_for_nothing(hub, tmp_path):
    out = tmp_path / "deep" / "out"
    hub.files = shards(9)
    printed, error = fetch(hub, out)
    assert there(out) == hub.files and error == ""
    assert sorted(hub.asked) == sorted((name, None) for name in hub.files)
    assert sorted(printed.splitlines()[:-1]) == sorted(f"{name}: downloaded" for name in hub.files)
    assert printed.splitlines()[-1] == "out: validation shard and 9 training shards are there"
    hub.asked.clear(), hub.heads.clear()
    assert fetch(hub, out) == ("out: validation shard and 9 training shards are there\n", "")
    assert hub.asked == hub.heads == []


def test_n_shards_and_only_those_that_are_missing(hub, tmp_path):
    hub.files = shards(3)
    for name in (VAL, TRAIN[1]):
        (tmp_path / name).write_bytes(hub.files[name])
    fetch(hub, tmp_path, 2)
    assert hub.asked == [(TRAIN[0], None)] and there(tmp_path) == shards(2)


def test_shard_counts():
    assert fineweb.shard_count("all") == 103 and fineweb.shard_count("0") == 0
    for wrong in ("104", "-1", "many"):
        with pytest.raises(fineweb.argparse.ArgumentTypeError):
            fineweb.shard_count(wrong)


def test_several_at_once(hub, tmp_path):
    hub.files = shards(4)
    (tmp_path / VAL).write_bytes(hub.files[VAL])
    hub.gather = threading.Barrier(4, timeout=WAIT)   # no answer comes before four are asked for
    fetch(hub, tmp_path, 4)
    assert there(tmp_path) == hub.files


BROKEN = {"magic": (shard([1], magic=20240521), "wrong header"), "stump": (b"<html>", "wrong header"),
          "short": (shard([1, 2], promised=3), "1028 bytes, but"), "long": (shard([1, 2], promised=1), "1028 bytes, but"),
          "token": (shard([1, 50257]), "token 50257, but GPT-2's are below 50257")}


def test_what_is_there_and_broken_is_replaced(hub, tmp_path):
    names = [VAL, *TRAIN[:len(BROKEN) - 1]]
    hub.files = shards(len(BROKEN))
    for name, (content, _) in zip(names, BROKEN.values()):
        (tmp_path / name).write_bytes(content)
    (tmp_path / TRAIN[len(BROKEN) - 1]).write_bytes(hub.files[TRAIN[len(BROKEN) - 1]])
    printed, error = fetch(hub, tmp_path, len(BROKEN))
    for name, (_, message) in zip(names, BROKEN.values()):
        assert re.search(rf"^{name}: removing a broken file \(.*{message}.*\)$", printed, re.M)
    assert sorted(hub.asked) == sorted((name, None) for name in names) and there(tmp_path) == hub.files


@pytest.mark.parametrize("kind", ("magic", "short", "token"))
def test_what_arrives_broken_is_not_kept(hub, tmp_path, kind):
    hub.files[VAL], message = BROKEN[kind]
    error = one_line(fetch(hub, tmp_path, 0, status=1)[1])
    assert f"{VAL} arrived broken, and was removed" in error and message in error
    assert there(tmp_path) == {}


def test_what_arrives_must_have_the_checksum(hub, tmp_path):
    hub.etags[VAL] = "0" * 64
    assert "its checksum is not the hub's" in one_line(fetch(hub, tmp_path, 0, status=1)[1])
    assert there(tmp_path) == {}
    hub.etags[VAL] = "of another kind"
    fetch(hub, tmp_path, 0)
    assert there(tmp_path) == shards(0)


# ---- What breaks off ---------------------------------------------------------------------------------------------

@pytest.mark.slow
def test_a_lost_connection_is_taken_up_again(hub, tmp_path):
    hub.files = {VAL: LARGE}
    hub.breaks[VAL] = [(2 * PIECE + 5000, "close")]
    assert fetch(hub, tmp_path, 0)[1] == ""
    assert hub.asked == [(VAL, None), (VAL, f"bytes={2 * PIECE}-")]
    assert there(tmp_path) == {VAL: LARGE}


def wait_for(condition) -> None:
    end = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def held(hub, out, how="hold") -> tuple[subprocess.Popen, Path]:
    """A process that has the first shard and one piece of the second, waiting for more; and the file with that piece."""
    hub.files[TRAIN[0]] = LARGE
    hub.breaks[TRAIN[0]] = [(PIECE * 3 // 2, how)]
    process = start(hub, out, 1)
    wait_for(lambda: [path.stat().st_size for path in out.glob(f"{TRAIN[0]}.*.tmp")] == [PIECE])
    return process, next(out.glob("*.tmp"))


@pytest.mark.slow
@pytest.mark.parametrize("number", (signal.SIGKILL, signal.SIGINT))
def test_a_stopped_download_has_no_shards_name_and_only_its_rest_is_asked_for(hub, tmp_path, number):
    process, part = held(hub, tmp_path)
    process.send_signal(number)
    printed, error = process.communicate(timeout=WAIT)   # though no more arrives
    if number == signal.SIGINT:
        assert process.returncode == 130 and "interrupted" in one_line(error)
    else:
        assert process.returncode == -number and error == ""
    assert printed == f"{VAL}: downloaded\n"
    assert there(tmp_path) == {VAL: hub.files[VAL], part.name: LARGE[:PIECE]}
    hub.asked.clear()
    fetch(hub, tmp_path, 1)
    assert hub.asked == [(TRAIN[0], f"bytes={PIECE}-")] and there(tmp_path) == hub.files


@pytest.mark.slow
def test_a_reset_connection_is_taken_up_again_if_anything_came(hub, tmp_path):
    process, _ = held(hub, tmp_path, "reset")
    hub.release.set()
    process.communicate(timeout=WAIT)
    assert process.returncode == 0 and hub.asked[1:] == [(TRAIN[0], None), (TRAIN[0], f"bytes={PIECE}-")]
    assert there(tmp_path) == hub.files
    (tmp_path / VAL).unlink()
    hub.breaks[VAL] = [(100, "reset")]
    assert "reset" in one_line(fetch(hub, tmp_path, 0, status=1)[1]).lower()


def part_of(out, name: str, body: bytes) -> Path:
    """The file in which a download of `body` collects it."""
    return out / f"{name}.{hashlib.sha256(body).hexdigest()[:16]}.tmp"


@pytest.mark.slow
def test_a_part_of_another_version_is_not_completed(hub, tmp_path):
    process, part = held(hub, tmp_path)
    process.kill(), process.communicate()
    hub.files[TRAIN[0]] = LARGE[:-2] + b"\1\1"
    hub.asked.clear()
    fetch(hub, tmp_path, 1)
    assert there(tmp_path) == hub.files and hub.asked == [(TRAIN[0], None)]


def test_a_part_that_is_too_long_is_not_completed(hub, tmp_path):
    part_of(tmp_path, VAL, hub.files[VAL]).write_bytes(bytes(len(hub.files[VAL]) + 1))
    fetch(hub, tmp_path, 0)
    assert there(tmp_path) == shards(0) and hub.asked == [(VAL, None)]


def test_a_damaged_part_is_found_out(hub, tmp_path):
    """As after a power cut: of the right length, with other tokens."""
    part_of(tmp_path, VAL, hub.files[VAL]).write_bytes(hub.files[VAL][:-2] + b"\1")
    assert "its checksum is not the hub's" in one_line(fetch(hub, tmp_path, 0, status=1)[1])
    assert there(tmp_path) == {} and hub.asked == [(VAL, f"bytes={len(hub.files[VAL]) - 1}-")]


def test_one_failure_ends_all_at_once(hub, tmp_path):
    hub.files = shards(3)
    del hub.files[TRAIN[1]]
    hub.breaks[TRAIN[0]], hub.breaks[TRAIN[2]] = [(4, "hold")], [(4, "hold")]
    (tmp_path / TRAIN[1]).write_bytes(BROKEN["short"][0])   # nor does what was there before keep its name
    error = one_line(fetch(hub, tmp_path, 3, status=1)[1])
    assert "404" in error and TRAIN[1] in error
    assert [name for name in there(tmp_path) if name.endswith(".bin")] == [VAL]


# ---- What is not the hub -----------------------------------------------------------------------------------------

def test_no_server(hub, tmp_path):
    hub.server.server_close()
    hub.server.shutdown()
    assert "refused" in one_line(fetch(hub, tmp_path, status=1)[1])
    assert there(tmp_path) == {}


def test_no_address(hub, tmp_path):
    hub.port = "abc"
    printed = fetch(hub, tmp_path, status=1)[1]
    assert re.fullmatch(r"fineweb.py: HF_ENDPOINT=http://127.0.0.1:abc: not an address \(.*\); mend or unset it\n", printed)
    assert there(tmp_path) == {}


def test_a_login_page_is_not_the_hub(hub, tmp_path):
    hub.etags[VAL] = None
    assert "is not the hub" in one_line(fetch(hub, tmp_path, status=1)[1])
    assert hub.asked == [] and there(tmp_path) == {}


def test_a_folder_that_cannot_be_made(hub, tmp_path):
    (tmp_path / "file").write_text("mine")
    assert "exists" in one_line(fetch(hub, tmp_path / "file", status=1)[1])


def test_bars_on_a_terminal(hub, tmp_path):
    """A bar for a download, which goes on where the one before it stopped."""
    hub.files = {VAL: LARGE}
    part_of(tmp_path, VAL, LARGE).write_bytes(LARGE[:PIECE])
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("4H", 24, 100, 0, 0))   # a terminal without columns has no bars
    assert start(hub, tmp_path, 0, stdout=its, stderr=its).wait(WAIT) == 0
    shown = os.read(ours, 1 << 16).decode()
    assert re.search(rf"{VAL}: +40%.*{VAL}: 100%", shown, re.S) and f"{VAL}: downloaded" in shown, shown
    os.close(ours), os.close(its)
