"""Runs a script's command line in this process, and notes what its functions get and return."""

import contextlib
import gc
import importlib.util
import io
import os
import re
import shutil
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor


def load_script(path: Path) -> ModuleType:
    """Imports a script anew, by a name of its own: torch's operations have it, and cannot be made twice."""
    name = f"watched{len(sys.modules)}"
    spec: Any = importlib.util.spec_from_file_location(name, path)
    if spec is None:
        raise ImportError("its name does not end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module


def find_tokens(folder: Path, split: str) -> np.ndarray:
    """Returns the tokens (n,) uint16 of a folder's shards of a split, which follow 1024 bytes of header."""
    paths = sorted(folder.glob(f"[!.]*_{split}_*.bin"))
    return np.concatenate([np.fromfile(path, "<u2", offset=1024) for path in paths])


def mark(tokens: np.ndarray, bos_id: int, vocab_size: int, seed: int) -> None:
    """Replaces tokens by random ones, but not where documents begin. A few neighbours then tell their place,
    because no others are the same.
    """
    starts = tokens == bos_id
    tokens[:] = np.random.default_rng(seed).integers(0, vocab_size - 1, len(tokens))
    tokens[tokens >= bos_id] += 1
    tokens[starts] = bos_id


def copy_data(source: Path, folder: Path, others: Sequence[tuple[str, float]]) -> None:
    """Copies the files of data to a new folder. (PATTERN, SHARE): such shards get other tokens, after a share
    of them that stays.
    """
    shutil.copytree(source, folder)
    for pattern, share in others:
        for path in folder.glob(pattern):
            vocab_size, bos_id = np.fromfile(path, "<i4", 5)[3:].tolist()
            tokens = np.memmap(path, "<u2", "r+", 1024)
            seed = zlib.crc32(path.name.encode())
            # A shard of GPT-2's tokens has zeros in its header.
            mark(tokens[int(share * len(tokens)) :], bos_id or 50256, vocab_size or 50257, seed)


class Watch:
    """Runs a script once, with hooks on what every copy of it has. If `dry`, steps do not train; all else
    happens.
    """

    def __init__(self, script: Path, dry: bool):
        self.tg = load_script(script)
        self.dry = dry
        self.is_timed = False  # inside train(), where the clock runs
        self.is_in_step = False
        self.events = []  # ("step" or "validation", when it began, when it ended, in seconds)
        self.losses = []  # of each step
        self.given = []  # of each step: the inputs of its micro-batches
        self.forwarded = []  # of each step: the inputs that went through the model
        self.asked = []  # of each forward of the last validation: inputs and targets as bytes, mean loss
        self.hook(self.tg.GPT, "forward", self.on_forward)
        self.hook(self.tg.GPT, "token_losses", self.on_token_losses)
        self.hook(self.tg.ValLoader, "slice", self.on_slice)
        self.hook(self.tg, "train_step", self.on_step)
        self.hook(self.tg, "train", self.on_train)

    def hook(self, owner: Any, name: str, handler: Callable) -> None:
        """Replaces a function by handler(function with its keywords, its other arguments)."""
        original = getattr(owner, name)
        setattr(owner, name, lambda *args, **keywords: handler(partial(original, **keywords), *args))

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
        if status:
            raise RuntimeError(*re.findall(".*[Ee]rror.*", screen.getvalue())[-1:])
        for path in folder.glob("records/*/*/*.txt"):
            self.log = path.read_text(encoding="utf-8")

    def weights(self) -> list[Tensor]:
        """Returns the weights, and the table of n-grams."""
        tensors = list(self.model.state_dict().values())
        ngrams = getattr(self.model, "ngrams", None)
        if ngrams is not None:
            tensors.append(ngrams.block)
        return tensors

    def checksum(self) -> int:
        crc = 0
        for tensor in self.weights():
            crc = zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy().data, crc)
        return crc

    def on_train(self, original, *args):
        self.is_timed = True
        result = original(*args)
        self.is_timed = False
        self.outcome = self.losses, self.checksum()
        return result

    def on_step(self, original, model, optimizer, batch, *more):
        if self.is_timed:  # not in the warm-up
            if not self.losses:
                self.model = model
                self.checksum_at_start = self.checksum()
            self.asked.clear()
            self.given.append([part.inputs.numpy().copy() for part in batch.micro_batches])
            self.forwarded.append([])
        began = time.perf_counter()
        self.is_in_step = self.is_timed
        loss = torch.zeros(()) if self.dry else original(model, optimizer, batch, *more)
        self.is_in_step = False
        if self.is_timed:
            self.losses.append(float(loss))
            self.events.append(("step", began, time.perf_counter()))
        return loss

    def on_forward(self, original, model, *args):
        for value in args:
            if self.is_in_step and hasattr(value, "inputs"):
                self.forwarded[-1].append(value.inputs.numpy().copy())
        return original(model, *args)

    def on_slice(self, original, loader, i):
        began = time.perf_counter()
        micro_batch = original(loader, i)
        if self.is_timed:
            self.events.append(("validation", began, time.perf_counter()))
        return micro_batch

    def on_token_losses(self, original, model, micro_batch, *options):
        self.token_losses = original
        self.options = options  # what validation gives besides the batch
        began = time.perf_counter()
        losses = original(model, micro_batch, *options)
        if self.is_timed:
            key = bytes(micro_batch.inputs.long().numpy()), bytes(micro_batch.targets.long().numpy())
            self.asked.append((key, losses.double().mean().item()))
            self.events.append(("validation", began, time.perf_counter()))
        return losses

    def seconds(self) -> float:
        """Returns the time from the first step to the last validation, less the validations between."""
        total = 0.0
        before = None
        for kind, began, ended in self.events:
            if kind == "step":
                total += ended - began
            if before is not None and "step" in (kind, before[0]):
                total += began - before[1]
            before = kind, ended
        return total
