#!/usr/bin/env python3
"""Times what the host does in a training step, against an earlier commit's script.

    python bench/host_time.py [--against 2cc3a01] [--steps 10] [--rounds 40]

The step computes next to nothing: the cpu preset's eleven layers at the smallest sizes, one micro-batch of
128 tokens, one process, one thread. Most of its time is dispatching, which on a GPU must keep ahead of the
kernels. It is not a GPU's host time: kernels and attention are plain torch here, a quarter of it attention.
Both scripts train in processes of their own, in turns. A round is the median over its steps of the thread's
CPU time, which has the backward too on a CPU. The ratio is the median over rounds, with quartiles.

The batch is ready before a step's time begins. The earlier script comes from git; `use_new_names` translates
what was renamed since 2cc3a01.
"""

import argparse
import importlib.util
import inspect
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "data")]
from tokenize_text import shard_header


def use_new_names(script) -> tuple[dict[str, str], dict[str, str]]:
    """Gives a script of 2cc3a01 the names used here. Returns its names of Config's and of Stage's fields."""
    if hasattr(script, "Prefetcher"):
        return {}, {}
    script.Prefetcher, script.select_backend, script.plan_step = (
        script.Batches,
        script.choose_ops,
        script.plan,
    )
    fields = {"microbatches": "slices", "bigram_vocab_size": "bigram_rows"}
    return fields, {"batch_tokens": "tokens", "max_doc_len": "longest"}


def load(path: str):
    spec = importlib.util.spec_from_file_location("script", path)
    module = sys.modules["script"] = importlib.util.module_from_spec(spec)  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def serve(path: str, shard: str) -> None:
    """Trains with the script at `path`. Reads numbers of steps; prints each such round's median ms."""
    import torch

    torch.set_num_threads(1)
    script = load(path)
    fields, stage_fields = use_new_names(script)

    def resized(node, names: dict[str, str], **sizes):
        return replace(node, **{names.get(name, name): value for name, value in sizes.items()})

    stages = tuple(
        resized(s, stage_fields, steps=10**6, batch_tokens=128, max_doc_len=64) for s in script.CPU.stages[:1]
    )
    sizes = dict(heads=2, head_dim=8, mlp_dim=16, head_chunk=64, microbatches=1, bigram_vocab_size=512)
    if hasattr(script, "Ngrams"):
        sizes["ngrams"] = script.Ngrams()  # bigrams, as all scripts before have
    cfg = resized(script.CPU, fields, **sizes, compile=True, val_slice_tokens=128, stages=stages)
    if hasattr(script, "compiler_of"):  # a backend had what compiles in earlier ones
        script.compiled.compiler = script.compiler_of(cfg)
    backend, device = script.select_backend(cfg, torch.device("cpu")), torch.device("cpu")
    model = script.GPT(cfg, 1, device, 0, backend)
    optimizer = script.Optimizer(cfg, dict(model.named_parameters()), script.Exchange(0, 1), backend)
    takes_pin = "pin" in inspect.signature(script.TrainLoader).parameters  # older ones
    loader = script.TrainLoader(cfg, [Path(shard)], 0, 1, *([False] if takes_pin else []))
    plans = (script.plan_step(cfg, step) for step in range(cfg.steps))
    tells_rows = "exchange" in inspect.signature(script.Prefetcher).parameters  # not before n-gram memory
    batches = script.Prefetcher(loader, plans, *([script.Exchange(0, 1)] if tells_rows else []))
    for line in sys.stdin:
        times = []
        for _ in range(int(line)):
            batch = batches.next()
            began = time.thread_time()
            script.train_step(model, optimizer, batch)
            times.append(1000 * (time.thread_time() - began))
        print(statistics.median(times), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--against", metavar="COMMIT", default="2cc3a01")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=40)
    args = parser.parse_args()
    if min(args.steps, args.rounds) < 1:
        sys.exit("host_time.py: error: give --steps and --rounds of 1 or more")
    show = ["git", "show", f"{args.against}:train_gpt.py"]
    with tempfile.TemporaryDirectory() as folder:
        earlier, shard = Path(folder, "earlier.py"), Path(folder, "tiny_train_000001.bin")
        shown = subprocess.run(show, cwd=ROOT, capture_output=True)
        if shown.returncode:
            sys.exit(f"host_time.py: error: --against {args.against}: {shown.stderr.decode().strip()}")
        earlier.write_bytes(shown.stdout)
        rng = np.random.default_rng(0)
        tokens = rng.integers(0, 256, 256 * (args.steps + 4) * (args.rounds + 1), dtype=np.uint16)
        tokens[::60] = 256
        shard.write_bytes(shard_header(len(tokens), 257, 256) + tokens.astype("<u2").tobytes())
        scripts, pipes = {args.against: earlier, "now": ROOT / "train_gpt.py"}, {}
        for name, path in scripts.items():
            command = [sys.executable, __file__, "--serve", str(path), str(shard)]
            pipes[name] = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        times: dict[str, list[float]] = {name: [] for name in scripts}
        for i in range(args.rounds + 1):
            for name, process in [*pipes.items()][:: 1 if i % 2 else -1]:
                process.stdin.write(f"{args.steps}\n")
                process.stdin.flush()
                if not (line := process.stdout.readline()):
                    sys.exit(f"host_time.py: error: the script {name} failed, see above")
                times[name].append(float(line))
        for process in pipes.values():
            process.stdin.close()
            process.wait()
    before, now = (times[name][1:] for name in scripts)  # the first round compiles
    low, ratio, high = np.quantile([b / a for a, b in zip(before, now)], (0.25, 0.5, 0.75))
    print(f"{args.against}: {statistics.median(before):.2f} ms a step, now: {statistics.median(now):.2f} ms")
    print(f"ratio {ratio:.3f}, quartiles {low:.3f} and {high:.3f} of {args.rounds} rounds")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(*sys.argv[2:])
    else:
        main()
