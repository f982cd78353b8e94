#!/usr/bin/env python3
"""Times records/compare.py on many large logs.

    python bench/compare_logs.py [--logs 1000] [--megabytes 1.0]

Writes the logs into a temporary folder: a fifth of each is source with lines that look like log lines, the
rest step lines, denser than in any real log. Runs `compare.py --json` on the folder, twice, as a user would,
and prints the seconds from start to exit, and per log. The logs were just written, so at least the second run
reads them from the file cache: this measures the parsing, not the disk.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

COMPARE = Path(__file__).resolve().parent.parent / "records" / "compare.py"
LOOK_ALIKE = '    print0(f"step:{step}/{steps} val_loss:{loss:.4f} train_time:{ms:.0f}ms")\n'
SOURCE = LOOK_ALIKE + "    x = norm(x + attn(x))  # residual\n" * 9
HEADER = (
    "Running Python 3.12.7\n"
    "Running PyTorch 2.13.0 compiled for CUDA 12.8 on NVIDIA H100 80GB HBM3 with world_size 8\n"
)


def log_text(size: int, seed: int) -> str:
    """Returns a log of `size` bytes, give or take a line. `seed` makes its loss and times distinct."""
    head = SOURCE * (size // 5 // len(SOURCE)) + "=" * 100 + "\n" + HEADER
    steps = (size - len(head)) // len("step:10000/12000 train_time:500000ms step_avg:50.00ms\n")
    lines = []
    for step in range(1, steps + 1):
        time_text = f"train_time:{step * 50 + seed}ms step_avg:50.00ms\n"
        lines.append(f"step:{step}/{steps} {time_text}")
        if step % 125 == 0 or step == steps:
            loss = 3.27 + 1e-5 * seed + 7 * (1 - step / steps)
            lines.append(f"step:{step}/{steps} val_loss:{loss:.4f} {time_text}")
    return head + "".join(lines) + "peak memory allocated: 31253 MiB reserved: 46520 MiB\n"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--logs", type=int, default=1000, metavar="N", help="default: %(default)s")
    parser.add_argument("--megabytes", type=float, default=1.0, metavar="X", help="default: %(default)s")
    args = parser.parse_args()
    if args.logs < 1 or args.megabytes < 0.01:
        parser.error("--logs must be at least 1, --megabytes at least 0.01")
    with tempfile.TemporaryDirectory() as folder:
        for i in range(args.logs):
            Path(folder, f"{i}.txt").write_text(log_text(int(args.megabytes * 1e6), i))
        total = sum(path.stat().st_size for path in Path(folder).iterdir())
        print(f"{args.logs} logs, {total / 1e6:.0f} MB, {os.cpu_count()} cores")
        command = [sys.executable, str(COMPARE), folder, "--json"]
        for _ in range(2):
            began = time.perf_counter()
            out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            seconds = time.perf_counter() - began
            count = json.loads(out)["groups"][0]["n"]
            if count != args.logs:
                sys.exit(f"compare.py counted {count} runs")
            print(f"compare.py: {seconds:.2f} s, {1000 * seconds / args.logs:.1f} ms a log")
    return 0


if __name__ == "__main__":
    sys.exit(main())
