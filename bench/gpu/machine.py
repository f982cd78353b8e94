"""What the checks of check.py share: the settings that this machine can run, and runs of train_gpt.py."""

import contextlib
import gc
import itertools
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]
import step_time as st
import train_gpt as tg
from kernels import rel_err
from runner import UNCHECKED, Row
from synthetic import write_shards

# A feature of the record preset, and the setting with it alone; the setting without it.
ONLY = {"kernels": f"kernels={','.join(tg.RECORD.kernels)}", "attention": "attention_impl=varlen"}
ONLY |= {"fp8": "fp8=true"}
OFF = {"kernels": "kernels=", "attention": "attention_impl=dense"}
OFF |= {"fp8": "fp8=false", "compile": "compile=false"}
PLAIN = " ".join(OFF.values())
# An eighth of the record preset's, so that one GPU holds them, and so few that they hardly take memory.
FEWER_ROWS = "ngrams.rows_per_order=5287680"
FEW_ROWS = "ngrams.rows_per_order=65536"
TINY = (  # the cpu preset in seconds; multiples of 16, for FP8
    "heads=2 head_dim=16 mlp_dim=64 pointer_dim=16 padded_vocab=272 head_chunk=64 ngrams.orders=2,3 "
    "ngrams.width=32 ngrams.rows_per_order=4096 fp8=true dtype=bfloat16 bank_dtype=bfloat16 microbatches=2 "
    "stages.*.steps=1 stages.0.steps=2 stages.*.batch_tokens=256 stages.2.batch_tokens=384 "
    "stages.*.max_doc_len=40 val_slices=1 val_slice_tokens=256 val_every=0 softcap.scale=23 softcap.shift=5 "
    "stages.0.mtp=1,0.5,0.25 stages.1.mtp=1,0.5"  # as in the record preset
)


def with_settings(cfg: tg.Config, settings: str) -> tg.Config:
    for setting in settings.split():
        cfg = tg.override(cfg, setting)
    return cfg


def draw_once() -> None:
    """Keeps what GPT.initialize draws: at full width that takes many seconds, for each of many models."""
    draw = tg.initial_value
    drawn = {}

    def initial_value(name: str, cfg: tg.Config, seed: int) -> Tensor:
        key = name, seed, tg.param_shapes(cfg, 1)[name]
        if key not in drawn:
            drawn[key] = draw(name, cfg, seed)
        return drawn[key]

    tg.initial_value = initial_value


class Setup:
    """What the checks of a process share. The costly parts are made when they are first used."""

    def __init__(self, scratch: Path, out: Path):
        self.device = tg.init_process()[-1]
        self.on_gpu = self.device.type == "cuda"
        self.scratch = scratch
        self.out = out
        self.missing: list[Row] = []
        if self.on_gpu:
            self.preset = "record"
            self.settings = FEWER_ROWS
            self.gpus = torch.cuda.device_count()
            self.warmup_ranges = 4
            self.timed_steps = 6
            for feature in ONLY:
                self.switch_off_if_missing(feature)
        else:
            self.preset = "cpu"
            self.settings = TINY
            self.gpus = 0
            self.warmup_ranges = 2
            self.timed_steps = 2
            os.environ["OMP_NUM_THREADS"] = "1"  # of processes that checks start
            torch.set_num_threads(1)
        self.ranks = 1  # of a run
        for ranks in (2, 4, 8):
            if ranks <= self.gpus:
                self.ranks = ranks
        self.cfg = with_settings(tg.PRESETS[self.preset], self.settings)
        draw_once()

    def switch_off_if_missing(self, feature: str) -> None:
        try:
            tg.select_backend(with_settings(tg.RECORD, f"{PLAIN} {ONLY[feature]}"), self.device)
        except tg.UserError as e:
            self.settings += f" {OFF[feature]}"
            self.missing.append(Row(feature, seen=f"{UNCHECKED}{e}", off=OFF[feature]))

    @cached_property
    def paths(self) -> list[Path]:
        stages = list(range(len(self.cfg.stages)))
        return st.synthetic_shard(str(self.scratch), self.cfg, stages, 16)

    @cached_property
    def copy_rate(self) -> float:
        """Returns bytes/s of a copy, read and written."""
        n = 1 << (30 if self.on_gpu else 20)
        a = torch.zeros(n, dtype=torch.uint8, device=self.device)
        b = torch.zeros_like(a)
        return 2 * n / st.timed([lambda: b.copy_(a)], self.device, 10)[0] * 1000

    @cached_property
    def matmul_rate(self) -> float:
        return st.matmul_ceiling(self.device)

    @cached_property
    def exact(self) -> tuple[float, dict[str, Tensor]]:
        """Returns the loss and the gradients of plain fp32."""
        cfg = with_settings(self.cfg, f"{PLAIN} dtype=float32 bank_dtype=float32")
        loss, grads = loss_and_gradients(self, replace(cfg, head_chunk=min(2048, cfg.head_chunk)))
        return loss, {name: grad.cpu() for name, grad in grads.items()}

    @cached_property
    def plain(self) -> tuple[float, dict[str, float]]:
        """Returns the loss and the gradients' errors of plain bf16."""
        return loss_and_errors(self, with_settings(self.cfg, PLAIN))

    def synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()

    def rand(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device).to(tg.dtype_of(self.cfg.dtype))

    @contextlib.contextmanager
    def training(
        self, cfg: tg.Config, stage: int, world_size: int, steps: int, compiled_by: st.Variant | None = None
    ) -> Iterator[st.Training]:
        """Builds a training; the script's functions are compiled as it needs while the context is open.

        compiled_by: a variant that shares what it has compiled.
        """
        variant = st.Variant("", cfg, self.device)
        if compiled_by:
            variant.compiler = compiled_by.compiler
        training = st.Training(variant, stage, world_size, self.paths, steps)
        variant.activate()
        try:
            yield training
        finally:
            tg.COMPILER = None
            training.loader.close()

    def is_lost(self) -> bool:
        """Frees memory. Returns True if the GPU's context is lost: after a fault every later call raises."""
        try:
            gc.collect()
            if self.on_gpu:
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
        except RuntimeError:
            return True
        return False


def loss_and_gradients(setup: Setup, cfg: tg.Config) -> tuple[float, dict[str, Tensor]]:
    """Returns the loss and all gradients of one micro-batch of a rank of 8; the model is the same for all."""
    with setup.training(cfg, 0, 8, 2) as training:
        model = training.model
        optimizer = training.optimizer
        optimizer.step = lambda *_: None  # type: ignore[method-assign]
        generator = torch.Generator(setup.device).manual_seed(1)
        with torch.no_grad():
            for p in model.parameters():  # away from zeros, which hide mistakes
                noise = torch.randn(p.shape, generator=generator, device=p.device)
                p.copy_((p + 0.02 * noise).bfloat16())
        if cfg.compile:
            training.validate()  # as before a run's first step
        batch = training.batches.next()
        batch = batch._replace(micro_batches=batch.micro_batches[:1])
        optimizer.wait()
        if model.fp8_state:
            model.fp8_state.scales[:, 2] = 1
        for _ in range(2):  # the first finds the scales of squares and of their gradients in FP8
            optimizer.drop_grads()
            loss = tg.train_step(model, optimizer, batch).item()
        grads = {}
        for name, p in model.named_parameters():
            param = optimizer.params.get(name)  # None: a part of a vector, of which p.grad is its part
            if param is None or param.main_grad is None:
                grads[name] = p.grad
            else:
                grads[name] = param.main_grad
        table = optimizer.ngrams
        if table:
            grads["ngrams"] = table.main_grad[: len(table.routes.row_ids)]
        return loss, grads


def loss_and_errors(setup: Setup, cfg: tg.Config) -> tuple[float, dict[str, float]]:
    """Returns the loss, and each gradient's relative error."""
    _, exact = setup.exact
    loss, grads = loss_and_gradients(setup, cfg)
    return loss, {name: rel_err(grad, exact[name].to(grad.device)) for name, grad in grads.items()}


def device_ms(training: st.Training) -> float:
    """Returns the GPU's ms of a step, without waiting for launches: a mean over an Adam period.

    The GPU first sleeps for 0.1 s, while the host launches what its queue takes: about a step of one
    micro-batch. On a CPU returns 0.
    """
    if not training.on_gpu:
        return 0.0
    total = 0.0
    for _ in range(2):
        batch = training.batches.next()
        begin = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        training.synchronize()
        torch.cuda._sleep(180_000_000)
        begin.record()
        tg.train_step(training.model, training.optimizer, batch, training.batches.peek)
        end.record()
        end.synchronize()
        total += begin.elapsed_time(end)
    return total / 2


@dataclass
class Run:
    """What the log of a run of train_gpt.py says."""

    val_loss: float
    steps: int
    ms: float  # of a step, without validation
    mib: float  # of GPU memory that tensors took at most
    warm_up: float  # seconds
    losses: dict[int, float]  # of training, by step
    fastest: float  # ms of a step between two validations, where that took the least

    def line(self) -> str:
        seen = f"val_loss {self.val_loss:.4f}, {self.ms:.1f} ms a step, {self.mib:.0f} MiB"
        return f"{seen}, warm-up {self.warm_up:.0f} s"


def near(val_loss: float, before: float) -> tuple[str, bool]:
    """Returns what a run's validation loss is expected to be if another run had `before`, and if it is."""
    # After few steps: other roundings move it by some thousandths, a wrong update by far more.
    return f"val_loss {before:.4f} +- 0.02", abs(val_loss - before) <= 0.02


def read_run(text: str) -> Run:
    """Reads a log."""

    def last(pattern: str) -> float:
        return float(re.findall(pattern, text, re.M)[-1])

    steps = int(last(r"^steps: (.+)$"))
    fastest = math.inf
    # The clock waits for the GPU only where it validates.
    validated = re.findall(r"^step:(\d+)/\d+ val_loss:\S+ train_time:(\d+)ms", text, re.M)
    for (step, ms), (next_step, next_ms) in itertools.pairwise(validated):
        fastest = min(fastest, (int(next_ms) - int(ms)) / (int(next_step) - int(step)))
    losses = {}
    for loss, step in re.findall(r"train_loss:(\S+)@(\d+)", text):
        losses[int(step)] = float(loss)
    return Run(
        val_loss=last(r"^val_loss: (.+)$"),
        steps=steps,
        ms=last(r"^train_time_ms: (.+)$") / steps,
        mib=last(r"^peak memory allocated: (\d+)"),
        warm_up=last(r"took (.+) s and was"),
        losses=losses,
        fastest=fastest,
    )


def run_script(setup: Setup, name: str, settings: str, more: Sequence[str] = ()) -> Run:
    """Trains by train_gpt.py, on all GPUs, on synthetic tokens. `more`: options besides the settings.

    Moves the log, and what is beside it, to OUT as NAME.*. Raises RuntimeError with all that was printed.
    """
    cfg = with_settings(tg.PRESETS[setup.preset], settings)
    # A document has 700 tokens on average, of which a batch takes at most max_doc_len.
    tokens = sum(stage.steps * stage.batch_tokens for stage in cfg.stages)
    tokens *= 2 + 3000 // min(stage.max_doc_len for stage in cfg.stages)
    data = setup.scratch / f"data_{tokens}"
    write_shards(data, tokens, cfg.val_slices * cfg.val_slice_tokens + 1, cfg.vocab_size)
    cwd = setup.out / name.replace(" ", "_")
    command = [sys.executable]
    if setup.ranks > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={setup.ranks}"]
    command += [str(ROOT / "train_gpt.py"), "--preset", setup.preset, "--data", str(data), *more]
    command += [f"--set={setting}" for setting in settings.split()]
    shutil.rmtree(cwd, ignore_errors=True)
    cwd.mkdir()
    done = subprocess.run(command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        printed = done.stdout.strip().splitlines() or ["nothing"]
        raise RuntimeError("\n".join([f"status {done.returncode}: {printed[-1]}"] + printed))
    log = re.findall(r"^log: (.+)$", done.stdout, re.M)[-1]  # relative to the script's folder
    path = next(path for path in (ROOT / log, cwd / log) if path.exists())
    text = path.read_text()
    for file in path.parent.glob(f"{path.stem}.*"):  # traces, too
        shutil.move(file, setup.out / file.name.replace(path.stem, cwd.name))
    shutil.rmtree(cwd)
    return read_run(text)
