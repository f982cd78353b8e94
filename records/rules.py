"""Shows each rule of records/referee.py on a script: a function each, which returns what the table says."""

import dataclasses
import hashlib
import os
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import tracks
from referee import OK, RULES
from watch import MULTIPLIER, Watch, copy_data, load_script, read_tokens

SHORT = 10  # steps of a short run
NOISE = 0.1  # standard deviation of what is added to each weight: gates that are 0 hide what is behind them
LOSS_TOLERANCE = 1e-6  # of a loss that must stay; today it keeps its bits, but other kernels may round
SUM_TOLERANCE = 1e-4  # of the sum of probabilities, and of a validation's loss, which the log rounds
CLOCK_TOLERANCE = 0.02  # of the time, and 20 ms
FEW_TOKENS = 1024  # of a vocabulary that is gone through at every position of a text
PLACE = 8  # neighbouring tokens of a marked shard tell their place

# Settings of the runs, beside those of all; which splits have other tokens. `changed` differs from `normal`
# in all that must not matter to training.
RUNS: dict[str, tuple[Sequence[str], Sequence[str]]] = {
    "normal": (["val_every=0"], []),
    "changed": (["val_every=1", "val_slices=1", "warmup=false"], ["val"]),
    "changed again": (["val_every=1", "val_slices=1", "warmup=false"], ["val"]),
    "changed, with its warm-up": (["val_every=1", "val_slices=1"], ["val"]),
    "marked": (["val_every=0", "val_slices=1", "warmup=false"], ["train", "val"]),
}


class Case:
    """Holds a script, and its runs when they are made.

    settings: of all runs, beside the preset. data: the folder of the preset's data.
    """

    def __init__(
        self,
        script: Path,
        preset: str,
        folder: Path,
        data: Path,
        log: Path | None = None,
        settings: Sequence[str] = (),
    ):
        self.script = script
        self.preset = preset
        self.folder = folder
        self.data = data
        self.log = log
        self.settings = settings
        self.tg = load_script(script)
        self.cfg: Any = self.tg.PRESETS[preset]
        for setting in settings:
            self.cfg = self.tg.override(self.cfg, setting)
        self.runs: dict[str, Watch | Exception] = {}
        self.is_noisy = False

    def arguments(self, kind: str) -> list[str]:
        """Returns the command line of a run."""
        chosen = [*self.settings, "samples=0", *RUNS[kind][0]]
        if kind != "marked":
            if hasattr(self.cfg, "length"):
                chosen.append(f"length={SHORT / self.cfg.steps:.4f}")
            else:
                for i, stage in enumerate(self.cfg.stages):
                    chosen.append(f"stages.{i}.steps={max(2, stage.steps * SHORT // self.cfg.steps)}")
        known = []
        for setting in chosen:
            if hasattr(self.cfg, re.split(r"[.=]", setting)[0]):  # earlier scripts lack some
                known.append(setting)
        return ["--preset", self.preset, "--set", *known]

    def run(self, kind: str) -> Watch:
        """Returns a run, which is made once. Raises what it has raised."""
        if kind not in self.runs:
            try:
                self.runs[kind] = self.make_run(kind)
            except Exception as error:
                self.runs[kind] = error
        found = self.runs[kind]
        if isinstance(found, Exception):
            raise found
        return found

    def make_run(self, kind: str) -> Watch:
        folder = self.folder / kind.replace(" ", "_")
        copy_data(self.data, folder / self.tg.PRESETS[self.preset].data, RUNS[kind][1])
        script = folder / self.script.name
        script.write_bytes(self.script.read_bytes())
        watch = Watch(script, dry=kind == "marked")
        watch.run(folder, self.arguments(kind))
        return watch

    def val_tokens(self) -> np.ndarray:
        """Returns the tokens of the validation shards."""
        return np.concatenate([read_tokens(path) for path in sorted(self.data.glob("*_val_*.bin"))])

    def noisy(self) -> Watch:
        """Returns the normal run, whose weights are moved away from where a short run has left them."""
        watch = self.run("normal")
        if not self.is_noisy:
            generator = torch.Generator().manual_seed(1)
            with torch.no_grad():
                for p in watch.model.parameters():
                    p += NOISE * torch.randn(p.shape, generator=generator)
            table = watch.model.ngrams
            if table is not None:
                fetch = table.fetch

                def noisy_fetch(rows: Tensor) -> Tensor:
                    found = fetch(rows)
                    columns = torch.arange(1, found.size(1) + 1)
                    return found + (NOISE * torch.sin(rows[:, None] * columns)).to(found.dtype)

                table.fetch = noisy_fetch
            self.is_noisy = True
        return watch


# ---- What validation computes ------------------------------------------------------------------------------


def make_batch(case: Case, tokens: np.ndarray) -> Any:
    """Returns tokens as a slice of a validation."""
    watch = case.run("normal")
    path = case.folder / "text_val_000000.bin"
    shards = sorted(case.data.glob("*_val_*.bin"))
    header = np.fromfile(shards[0], "<i4", 256)
    header[2] = len(tokens)
    path.write_bytes(header.tobytes() + tokens.astype("<u2").tobytes())
    cfg = dataclasses.replace(watch.model.cfg, val_slices=1, val_slice_tokens=len(tokens) - 1)
    return watch.tg.ValLoader(cfg, [path]).slice(0)


def losses_of(watch: Watch, batch: Any) -> Tensor:
    return watch.model.token_losses(batch, *watch.options).double()


def sample_text(case: Case) -> np.ndarray:
    """Returns the tokens of a validation slice and a last target, with at least four documents."""
    T = case.cfg.val_slice_tokens
    tokens = case.val_tokens()[: T + 1].copy()
    for start in (T // 5, T // 2 + 5, T // 2 + 6):
        tokens[start] = case.cfg.bos_id
    return tokens


def cuts_of(tokens: np.ndarray, bos_id: int) -> list[int]:
    """Returns the positions after which tokens are replaced: where documents begin and end, powers of two,
    where windows and blocks of attention end, others, and the last.
    """
    T = len(tokens) - 1
    cuts = {T - 1}
    for start in np.flatnonzero(tokens == bos_id)[:8].tolist():
        cuts.update(range(start - 2, start + 3))
    for power in range(T.bit_length()):
        cuts.update((2**power - 1, 2**power, 3 * 2**power))
    cuts.update(np.random.default_rng(2).integers(0, T, 12).tolist())
    return sorted(cut for cut in cuts if 0 <= cut < T)


def first_change(before: Tensor, after: Tensor) -> int | None:
    """Returns the first position whose loss has changed."""
    is_same = torch.isclose(before, after, rtol=LOSS_TOLERANCE, atol=LOSS_TOLERANCE)
    places = (~is_same).nonzero()
    return int(places[0]) if len(places) else None


def check_causal(case: Case) -> str:
    watch = case.noisy()
    tokens = sample_text(case)
    batch = make_batch(case, tokens)
    before = losses_of(watch, batch)
    cuts = cuts_of(tokens, case.cfg.bos_id)
    rng = np.random.default_rng(3)
    for cut in cuts:
        # The loss at `cut` has its own target still, but that is no longer the next input.
        changed = tokens.copy()
        changed[cut + 1 :] = rng.integers(0, case.cfg.vocab_size, len(tokens) - cut - 1)
        after = losses_of(watch, make_batch(case, changed)._replace(targets=batch.targets))
        place = first_change(before[: cut + 1], after[: cut + 1])
        if place is not None:
            change = float(after[place] - before[place])
            return f"broken: other tokens from {cut + 1} on change the loss at {place} by {change:.2g}"
    return f"{OK}: {len(cuts)} cuts"


def check_probability(case: Case) -> str:
    """Sums exp(-loss) over all targets. With few tokens it does so at every position of a text. Otherwise a
    document of three tokens is repeated, and each copy has other targets.
    """
    watch = case.noisy()
    size = case.cfg.padded_vocab
    T = min(case.cfg.val_slice_tokens, 512)
    text = sample_text(case)[:T]
    text[[T // 3, T // 2]] = case.cfg.bos_id
    skipped = 0
    if size > FEW_TOKENS:
        text = np.array([case.cfg.bos_id, text[1], text[1]])
        skipped = 4  # copies: the first see other tokens before them
    copies = max(1, T // len(text))
    batch = make_batch(case, np.append(np.tile(text, copies), case.cfg.bos_id))
    columns = torch.arange(size)
    sums = torch.zeros(len(text), dtype=torch.float64)
    real = torch.zeros(len(text), dtype=torch.float64)
    for chunk in columns.split(copies - skipped):
        targets = batch.targets.clone().view(copies, len(text))
        targets[skipped : skipped + len(chunk)] = chunk[:, None]
        losses = losses_of(watch, batch._replace(targets=targets.flatten()))
        probs = torch.exp(-losses.view(targets.shape)[skipped : skipped + len(chunk)])
        sums += probs.sum(0)
        real += probs[chunk < case.cfg.vocab_size].sum(0)
    place = int(sums.argmax())
    if not sums[place] <= 1 + SUM_TOLERANCE:
        return (
            f"broken: at position {place} of a text the probabilities of all targets sum to {sums[place]:.4f}"
        )
    low = float(sums.min())
    return f"{OK}: sums {low:.4f} to {sums[place]:.4f}, of real tokens {real.min():.4f} to {real.max():.4f}"


def check_targets(case: Case) -> str:
    watch = case.noisy()
    batch = make_batch(case, sample_text(case))
    before = losses_of(watch, batch)
    generator = torch.Generator().manual_seed(4)
    for share in (0.5, 0.5, 0.05, 0.95):
        is_other = torch.rand(len(before), generator=generator) < share
        others = torch.randint(case.cfg.vocab_size, is_other.shape, generator=generator)
        after = losses_of(watch, batch._replace(targets=torch.where(is_other, others, batch.targets)))
        place = first_change(before[~is_other], after[~is_other])
        if place is not None:
            place = int((~is_other).nonzero()[place])
            return f"broken: the loss at {place} changes with the targets at other positions"
    return OK


def check_validation(case: Case) -> str:
    """Compares what the last validation asked with the shard, and its losses with the model's own."""
    T = case.cfg.val_slice_tokens
    tokens = case.val_tokens()
    count = min(case.cfg.val_slices, (len(tokens) - 1) // T)
    watch = case.run("normal")
    wanted = {}
    for i in range(count):
        part = tokens[i * T : (i + 1) * T + 1].astype(np.int64)
        wanted[part[:-1].tobytes() + part[1:].tobytes()] = i
    losses = {}
    for asked in watch.asked:
        key = asked.inputs.astype(np.int64).tobytes() + asked.targets.astype(np.int64).tobytes()
        if key not in wanted:
            return f"broken: validation took tokens that are not a slice of the first {count * T:,}"
        losses[wanted[key]] = asked.loss
    if len(watch.asked) != count or len(losses) != count:
        return f"broken: validation took {len(losses)} of {count} slices, in {len(watch.asked)} forwards"
    mean = float(np.mean(list(losses.values())))
    logged = float(re.findall(r"\nstep:\d+/\d+ val_loss:(\S+)", watch.log)[-1])
    if not abs(mean - logged) <= SUM_TOLERANCE:
        return f"broken: the log has a loss of {logged}, the slices a mean of {mean:.4f}"
    if not case.is_noisy:
        for i in sorted({count - 1, count // 2, count // 3, 1 % count, 0}, reverse=True):
            own = losses_of(watch, make_batch(case, tokens[i * T : (i + 1) * T + 1])).mean().item()
            if not abs(own - losses[i]) <= SUM_TOLERANCE:
                return f"broken: slice {i} had a loss of {losses[i]:.4f}, and alone it has {own:.4f}"
    if case.log is not None:
        logged_data = re.search(r"\ndata: (\w+)", log_header(case.log))
        own_data = fingerprint(case.data)
        if logged_data is None or logged_data[1] != own_data:
            return f"not shown: the data here are {own_data}, the log's are others"
    return f"{OK}: {count * T:,} tokens"


# ---- What training takes -----------------------------------------------------------------------------------


def place_keys(tokens: np.ndarray, bos_id: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns a key (n - PLACE + 1,) uint64 of every PLACE neighbours, and whether one document has them."""
    count = len(tokens) - PLACE + 1
    keys = np.zeros(max(0, count), np.uint64)
    is_inner = np.ones(max(0, count), bool)
    for k in range(PLACE):
        part = tokens[k : k + len(keys)].astype(np.uint64)
        keys = keys * np.uint64(MULTIPLIER) + part
        if k:
            is_inner &= part != bos_id
    return keys, is_inner


def check_once(case: Case) -> str:
    """Runs all steps without training, on shards whose tokens tell their place. Then no place may come twice.
    In the normal run every batch may go through the model once.
    """
    watch = case.run("marked")
    keys = []
    steps = []
    inner = []
    for step, parts in enumerate(watch.given):
        for part in parts:
            found, is_inner = place_keys(part, case.cfg.bos_id)
            keys.append(found)
            inner.append(is_inner)
            steps.append(np.full(len(found), step + 1))
    all_keys = np.concatenate(keys)
    all_steps = np.concatenate(steps)
    is_inner = np.concatenate(inner)
    if len(watch.given) != case.cfg.steps:
        return f"broken: {len(watch.given)} steps, not {case.cfg.steps}"
    shards = case.folder / "marked" / case.tg.PRESETS[case.preset].data
    for path in sorted(shards.glob("*_val_*.bin")):
        is_val = np.isin(all_keys, place_keys(read_tokens(path), case.cfg.bos_id)[0]) & is_inner
        if is_val.any():
            return f"broken: step {all_steps[is_val][0]} trains on tokens of {path.name}"
    _, first, counts = np.unique(all_keys, return_index=True, return_counts=True)
    if (counts > 1).any():
        key = all_keys[first[counts > 1].min()]
        at = all_steps[all_keys == key]
        return f"broken: tokens of step {at[0]} come again in step {at[1]}"
    is_known = ~is_inner
    for path in sorted(shards.glob("*_train_*.bin")):
        is_known |= np.isin(all_keys, place_keys(read_tokens(path), case.cfg.bos_id)[0])
    if not is_known.all():
        return f"broken: step {all_steps[~is_known][0]} has tokens that are in no training shard"
    normal = case.run("normal")
    for step, (given, forwarded) in enumerate(zip(normal.given, normal.forwarded), 1):
        if forwarded and Counter(map(bytes, given)) != Counter(map(bytes, forwarded)):
            return f"broken: step {step} sends other tokens through the model than its batch's, or some twice"
    if case.log is not None and not re.search(r"\nepochs: 1\n", case.log.read_text(errors="replace")):
        return "broken: the log does not say `epochs: 1`"
    return OK


def is_same(a: Watch, b: Watch) -> bool:
    return a.losses == b.losses and a.checksum_at_end == b.checksum_at_end


def check_blind(case: Case) -> str:
    normal = case.run("normal")
    changed = case.run("changed")
    for watch in (normal, changed):
        if watch.validation_changes_weights:
            return "broken: validation changes the weights"
    if is_same(normal, changed):
        return OK
    if not is_same(changed, case.run("changed again")):
        return "not shown: the same run twice differs"
    if is_same(normal, case.run("changed, with its warm-up")):
        return OK
    return "broken: other validation tokens, or more validations, change training"


def check_warm_up(case: Case) -> str:
    normal = case.run("normal")
    changed = case.run("changed")
    if normal.checksum_at_start != case.run("marked").checksum_at_start:
        return "broken: before the first step the weights depend on the warm-up or the data"
    if is_same(normal, changed):
        return OK
    if not is_same(changed, case.run("changed again")):
        return "not shown: the same run twice differs"
    if is_same(changed, case.run("changed, with its warm-up")):
        return OK
    return "broken: the run without warm-up differs"


def check_reproducible(case: Case) -> str:
    normal = case.run("normal")
    changed = case.run("changed")
    if not is_same(normal, changed) and not is_same(changed, case.run("changed again")):
        return "broken: the same seed twice gives other losses or weights"
    cfg = normal.model.cfg
    if cfg.microbatches % 2:
        return f"{OK}: but only one process can run it"
    tg = normal.tg
    paths = sorted(case.data.glob("*_train_*.bin"))
    alone = tg.TrainLoader(cfg, paths, 0, 1)
    pair = [tg.TrainLoader(cfg, paths, rank, 2) for rank in range(2)]
    place = None
    for step in range(cfg.steps):
        plan = tg.plan_step(cfg, step)
        batches = [loader.micro_batches(plan) for loader in (alone, *pair)]
        for number, part in enumerate(batches[0]):
            other = batches[1 + number % 2][number // 2]
            if place is None and not torch.equal(part.inputs, other.inputs):
                place = f"broken: step {step + 1} has another batch in 2 processes"
    for loader in (alone, *pair):
        loader.close()
    return place or OK


def check_clock(case: Case) -> str:
    for kind in ("normal", "changed"):
        watch = case.run(kind)
        seconds = watch.seconds()
        logged = float(re.findall(r"\nstep:\d+/\d+ val_loss:\S+ train_time:(\d+)ms", watch.log)[-1]) / 1000
        if logged < seconds * (1 - CLOCK_TOLERANCE) - 0.02:
            return f"broken: the log has {logged:.3f} s, training took {seconds:.3f} s"
    return OK


# ---- What the log says -------------------------------------------------------------------------------------


def split_log(log: Path) -> tuple[str, str]:
    """Returns a log's script, and what follows it."""
    script, _, rest = log.read_text(encoding="utf-8").partition(f"\n{'=' * 100}\n")
    return script, "\n" + rest


def log_header(log: Path) -> str:
    return split_log(log)[1]


def fingerprint(folder: Path) -> str:
    """Hashes the shards of a folder as the script does."""
    digest = hashlib.sha256()
    block = 1 << 16
    for split in ("train", "val"):
        for path in sorted(folder.glob(f"*_{split}_*.bin")):
            size = path.stat().st_size
            digest.update(f"{path.name} {size}\n".encode())
            with open(path, "rb") as file:
                for i in range(64):
                    file.seek(max(0, size - block) * i // 63)
                    digest.update(file.read(block))
    return digest.hexdigest()[:16]


def check_constants(case: Case) -> str:
    import json

    found = tracks.differences(case.preset, vars(case.tg.PRESETS[case.preset]), True)
    if found:
        return f"broken: in the script {', '.join(found)}"
    if case.log is not None:
        config = re.search(r"\nconfig: (\{.*\})\n", log_header(case.log))
        if config is None:
            return "not shown: the log has no config"
        found = tracks.differences(case.preset, json.loads(config[1]), True)
        if found:
            return f"broken: in the log {', '.join(found)}"
    return OK


def check_script(case: Case) -> str:
    if case.log is None:
        return "not shown: give its log with --log"
    if split_log(case.log)[0] != case.script.read_text(encoding="utf-8"):
        return "broken: the log has another script"
    commit = re.search(r"\ncommit: (\w+)(.*)\n", log_header(case.log))
    if commit is None or commit[2] not in ("", " (clean)"):
        return "not shown: by the log no commit has this script; commit it before the runs"
    show = ["git", "cat-file", "blob", f"{commit[1]}:./{case.script.name}"]
    blob = subprocess.run(show, cwd=case.script.parent, capture_output=True)
    if blob.returncode:
        return f"not shown: commit {commit[1][:12]} is not here"
    if blob.stdout != case.script.read_bytes():
        return f"broken: commit {commit[1][:12]} has another script"
    return OK


# The order in which they run: what needs the weights as training left them comes before the noise.
CHECKS: dict[str, Callable[[Case], str]] = {
    "the track's constants": check_constants,
    "the log's script": check_script,
    "the whole validation": check_validation,
    "the clock": check_clock,
    "validation is not trained on": check_blind,
    "warm-up is undone": check_warm_up,
    "reproducible": check_reproducible,
    "each token once": check_once,
    "causal": check_causal,
    "targets are only looked up": check_targets,
    "a probability": check_probability,
}


def judge(
    script: Path,
    preset: str,
    folder: Path,
    data: Path,
    log: Path | None = None,
    settings: Sequence[str] = (),
    rules: Sequence[str] = RULES,
) -> dict[str, str]:
    """Returns what the table says of each rule. `folder` is an empty one, for the runs."""
    case = Case(script, preset, folder, data, log, settings)
    results = {}
    for rule, check in CHECKS.items():
        if rule in rules:
            try:
                results[rule] = check(case)
            except Exception as error:
                results[rule] = f"not shown: {type(error).__name__}: {error}".splitlines()[0]
    return results
