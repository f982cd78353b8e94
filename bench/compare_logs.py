#!/usr/bin/env python3
"""How long records/compare.py takes over many large logs.

    python bench/compare_logs.py [--logs 1000] [--megabytes 1.0]

Writes that many logs of that size into a temporary folder: a fifth of each is source with lines that look like log
lines, the rest step lines, as dense as no real log has them. Then runs `compare.py --json` over the folder, twice, as
a user would, and prints the seconds from start to exit and what they are per log. The logs were just written, so
that the second run, at least, reads them from the file cache: this measures the searching, not the disk.
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
SOURCE = ('    print0(f"step:{step}/{steps} val_loss:{loss:.4f} train_time:{ms:.0f}ms")\n'
          + "    x = norm(x + attn(x))  # residual\n" * 9)


def log_text(size: int, seed: int) -> str:
    """A log of `size` bytes, give or take a line; `seed` makes its loss and time its own."""
    head = SOURCE * (size // 5 // len(SOURCE)) + "=" * 100 + "\nRunning Python 3.12.7\n" \
        "Running PyTorch 2.13.0 compiled for CUDA 12.8 on NVIDIA H100 80GB HBM3 with world_size 8\n"
    steps = (size - len(head)) // len("step:10000/12000 train_time:500000ms step_avg:50.00ms\n")
    lines = []
    for step in range(1, steps + 1):
        lines.append(f"step:{step}/{steps} train_time:{step * 50 + seed}ms step_avg:50.00ms\n")
        if step % 125 == 0 or step == steps:
            lines.append(f"step:{step}/{steps} val_loss:{3.27 + 1e-5 * seed + 7 * (1 - step / steps):.4f} "
                         f"train_time:{step * 50 + seed}ms step_avg:50.00ms\n")
    return head + "".join(lines) + "peak memory allocated: 31253 MiB reserved: 46520 MiB\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--logs", type=int, default=1000)
    parser.add_argument("--megabytes", type=float, default=1.0)
    args = parser.parse_args()
    if args.logs < 1 or args.megabytes < 0.01:
        parser.error("--logs must be at least 1, --megabytes at least 0.01")
    with tempfile.TemporaryDirectory() as folder:
        for i in range(args.logs):
            Path(folder, f"{i}.txt").write_text(log_text(int(args.megabytes * 1e6), i))
        total = sum(p.stat().st_size for p in Path(folder).iterdir())
        print(f"{args.logs} logs, {total / 1e6:.0f} MB, {os.cpu_count()} cores")
        for _ in range(2):
            began = time.perf_counter()
            out = subprocess.run([sys.executable, COMPARE, folder, "--json"], capture_output=True, text=True, check=True)
            seconds = time.perf_counter() - began
            read = json.loads(out.stdout)["groups"][0]["n"]
            if read != args.logs:
                sys.exit(f"compare.py counted {read} runs")
            print(f"compare.py: {seconds:.2f} s, {1000 * seconds / args.logs:.1f} ms a log")
    return 0


if __name__ == "__main__":
    sys.exit(main())
