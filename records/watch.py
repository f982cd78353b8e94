"""Runs a script's command line in this process, and notes what its functions get and return."""

import contextlib
import functools
import gc
import importlib.util
import io
import os
import shutil
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch

HEADER_BYTES = 1024  # of a shard; its tokens are uint16 after it


def load_script(path: Path) -> ModuleType:
    """Imports a script anew, by a name of its own: torch's operations have it, and cannot be made twice."""
    name = f"watched{len(sys.modules)}"
    spec: Any = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module


def find_tokens(folder: Path, split: str) -> np.ndarray:
    """Returns the tokens (n,) uint16 of a folder's shards of a split."""
    paths = sorted(folder.glob(f"*_{split}_*.bin"))
    return np.concatenate([np.fromfile(path, "<u2", offset=HEADER_BYTES) for path in paths])


def mark(tokens: np.ndarray, bos_id: int, vocab_size: int, seed: int) -> None:
    """Replaces tokens by random ones, but not where documents begin. A few neighbours then tell their place,
    because no others are the same.
    """
    starts = tokens == bos_id
    tokens[:] = np.random.default_rng(seed).integers(0, vocab_size - 1, len(tokens))
    tokens[tokens >= bos_id] += 1
    tokens[starts] = bos_id


def copy_data(source: Path, folder: Path, others: Sequence[str]) -> None:
    """Copies the files of data to a new folder, some with other tokens: of the splits `others`, or `unread`,
    the last quarter of the last training shard, which a short run does not come to.
    """
    shutil.copytree(source, folder)
    for split in others:
        paths = sorted(folder.glob("*_train_*.bin" if split == "unread" else f"*_{split}_*.bin"))
        for path in paths[-1:] if split == "unread" else paths:
            vocab_size, bos_id = np.fromfile(path, "<i4", 5)[3:].tolist()
            tokens = np.memmap(path, "<u2", "r+", HEADER_BYTES)
            first = len(tokens) * 3 // 4 if split == "unread" else 0
            # A shard of GPT-2's tokens has zeros there.
            mark(tokens[first:], bos_id or 50256, vocab_size or 50257, len(path.name + split))


class Event(NamedTuple):
    """Holds when a training step, or a part of a validation, began and ended, in seconds."""

    kind: str  # "step" or "validation"
    begin: float
    end: float


class Asked(NamedTuple):
    """Holds a forward of a validation."""

    inputs: np.ndarray
    targets: np.ndarray
    loss: float  # mean


class Watch:
    """Runs a script once, with hooks on what every copy of it has: GPT, its forward and token_losses,
    ValLoader, train and train_step.

    dry: no step trains and no validation computes. All else happens.
    """

    def __init__(self, script: Path, dry: bool):
        self.tg = load_script(script)
        self.dry = dry
        self.log = ""
        self.model: Any = None
        self.options: Any = ()  # what token_losses got besides the batch
        self.is_training = False  # inside train(), where the clock runs
        self.is_stepping = False
        self.events: list[Event] = []
        self.losses: list[float] = []  # of each step
        self.given: list[list[np.ndarray]] = []  # of each step: the inputs of its micro-batches
        self.forwarded: list[list[np.ndarray]] = []  # of each step: the inputs that went through the model
        self.asked: list[Asked] = []  # of the last validation
        self.validation_trains = False
        self.hook(self.tg.GPT, "__init__", self.on_model)
        self.hook(self.tg.GPT, "forward", self.on_forward)
        self.hook(self.tg.GPT, "token_losses", self.on_token_losses)
        self.hook(self.tg.ValLoader, "slice", self.on_slice)
        self.hook(self.tg, "train_step", self.on_step)
        self.hook(self.tg, "train", self.on_train)

    def hook(self, owner: Any, name: str, handler: Callable) -> None:
        """Replaces a function by handler(function, its arguments)."""
        original = getattr(owner, name)

        @functools.wraps(original)
        def hooked(*args, **kwargs):
            return handler(original, *args, **kwargs)

        setattr(owner, name, hooked)

    def run(self, folder: Path, arguments: Sequence[str]) -> None:
        """Runs the command line in `folder`, which gets the log. Raises RuntimeError if it fails."""
        screen = io.StringIO()
        before = os.getcwd()
        os.chdir(folder)
        torch.manual_seed(0)
        try:
            with contextlib.redirect_stdout(screen), contextlib.redirect_stderr(screen):
                status = self.tg.main(list(arguments))
        finally:
            os.chdir(before)
            gc.unfreeze()  # the script freezes all that there is
        if status and not self.dry:
            raise RuntimeError(f"the script failed: {screen.getvalue().strip().splitlines()[-1]}")
        for path in folder.glob("records/*/*/*.txt"):
            self.log = path.read_text(encoding="utf-8")

    def checksum(self) -> int:
        """Returns a checksum of the weights, and of the table of n-grams."""
        tensors = list(self.model.state_dict().values())
        ngrams = getattr(self.model, "ngrams", None)
        if ngrams is not None:
            tensors += ngrams.state_dict().values()
        crc = 0
        for tensor in tensors:
            crc = zlib.crc32(tensor.detach().reshape(-1).view(torch.uint8).numpy(), crc)
        return crc

    def on_model(self, original, model, *args, **kwargs):
        original(model, *args, **kwargs)
        self.model = model

    def on_train(self, original, *args, **kwargs):
        self.is_training = True
        try:
            return original(*args, **kwargs)
        finally:
            self.is_training = False
            self.end_validation()
            self.checksum_at_end = self.checksum()

    def on_step(self, original, model, optimizer, batch, *args, **kwargs):
        if not self.is_training:  # in the warm-up
            return original(model, optimizer, batch, *args, **kwargs)
        self.end_validation()
        if not self.losses:
            self.checksum_at_start = self.checksum()
        begin = time.perf_counter()
        self.given.append([np.array(part.inputs) for part in batch.micro_batches])
        self.forwarded.append([])
        self.is_stepping = True
        loss = torch.zeros(()) if self.dry else original(model, optimizer, batch, *args, **kwargs)
        self.is_stepping = False
        self.losses.append(float(loss))
        self.events.append(Event("step", begin, time.perf_counter()))
        return loss

    def on_forward(self, original, model, *args, **kwargs):
        if self.is_stepping:
            for value in [*args, *kwargs.values()]:
                if hasattr(value, "inputs"):
                    self.forwarded[-1].append(np.array(value.inputs))
        return original(model, *args, **kwargs)

    def on_slice(self, original, loader, *args):
        begin = time.perf_counter()
        micro_batch = original(loader, *args)
        if self.is_training:
            self.begin_validation()
            self.events.append(Event("validation", begin, time.perf_counter()))
        return micro_batch

    def on_token_losses(self, original, model, micro_batch, *options):
        self.options = options
        begin = time.perf_counter()
        if self.dry:
            losses = torch.zeros(len(micro_batch.inputs))
        else:
            losses = original(model, micro_batch, *options)
        if self.is_training:
            self.begin_validation()
            inputs, targets = np.array(micro_batch.inputs), np.array(micro_batch.targets)
            self.asked.append(Asked(inputs, targets, losses.double().mean().item()))
            self.events.append(Event("validation", begin, time.perf_counter()))
        return losses

    def begin_validation(self) -> None:
        if not self.events or self.events[-1].kind == "step":
            self.asked.clear()
            self.checksum_before_validation = self.checksum()

    def end_validation(self) -> None:
        if self.events and self.events[-1].kind == "validation":
            self.validation_trains |= self.checksum() != self.checksum_before_validation

    def seconds(self) -> float:
        """Returns the time from the first step to the last validation, less the validations between."""
        total = 0.0
        began = False
        since = None  # when training began, or went on
        validation_end = 0.0
        for event in self.events:
            if event.kind == "validation":
                if since is not None:
                    total += event.begin - since
                    since = None
                validation_end = event.end
            elif since is None:
                since = validation_end if began else event.begin
                began = True
        return total
