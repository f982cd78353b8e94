"""Shows each rule of records/referee.py on a script: a function each, which returns what the table says."""

import json
import re
import subprocess
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import tracks
from referee import OK, RULES, row
from torch import Tensor
from tqdm import tqdm
from watch import Watch, copy_data, find_tokens, load_script

from scripts import UserError

SHORT = 10  # steps of a short run
NOISE = 0.1  # standard deviation of what is added to each weight: gates that are 0 hide what is behind them
SHARPER = 4.0  # factor of the head's weights: after a few steps no token is improbable yet
LOSS_TOLERANCE = 1e-6  # of a loss that must stay
# The same, if documents end elsewhere. Attention then has blocks of other sizes, whose sums round otherwise:
# by up to 2e-6 of the loss with `words`, on an AMD EPYC.
OTHER_ENDS_TOLERANCE = 1e-5
SUM_TOLERANCE = 1e-4  # of the sum of probabilities, and of a validation's loss, which the log rounds
CLOCK_TOLERANCE = 0.02  # of the time, and as many seconds
FEW_TOKENS = 1024  # of a vocabulary, so that it can be gone through at every position of a text
PLACE = 8  # neighbouring tokens that tell their place in a shard of watch.mark()
MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # odd: 2^64 over the golden ratio

# Each run's settings beside those of all, and which text is another there. `changed` differs from `normal` in
# all that must not matter to training; the next two tell which of it does. In the last two no step trains.
FEW = ["val_every=1", "val_slices=1"]
UNTRAINED = ["val_every=0", "val_slices=1", "warmup=false"]
VAL = ("*_val_*.bin", 0.0)
TRAIN = ("*_train_*.bin", 0.0)
UNREAD = ("*_train_*.bin", 0.75)  # a short run does not come to the last quarter of a shard
RUNS = {
    "normal": (["val_every=0"], []),
    "changed": ([*FEW, "warmup=false"], [VAL, UNREAD]),
    "with warm-up": (FEW, [VAL, UNREAD]),
    "with warm-up and validation": (["val_every=0"], [UNREAD]),
    "full": (UNTRAINED, [VAL, TRAIN]),
    "reseeded": (UNTRAINED, [VAL, TRAIN]),
}
RUNS["changed again"] = RUNS["changed"]


@dataclass
class Case:
    """Holds a script, and its runs as far as they were made, in `folder`. `data` is the preset's data."""

    script: Path
    preset: str
    folder: Path
    data: Path
    log: Path | None = None

    def __post_init__(self):
        try:
            self.tg = load_script(self.script)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            raise UserError(f"{self.script} is no Python script that can be imported: {reason}") from None
        if self.preset not in getattr(self.tg, "PRESETS", ()):
            raise UserError(f"{self.script} has no preset {self.preset}; choose another --preset")
        self.cfg = self.tg.PRESETS[self.preset]
        self.log_text = self.log.read_text(encoding="utf-8", errors="replace") if self.log else ""
        self.runs: dict[str, Watch] = {}
        self.data_name = tracks.TRACKS[self.preset]["data"]
        self.is_noisy = False

    def run(self, kind: str) -> Watch:
        """Returns a run, which is made once. Raises RuntimeError if that failed before."""
        if kind not in self.runs:
            if (self.folder / kind).exists():
                raise RuntimeError(f"the run `{kind}` failed")
            self.runs[kind] = self.make_run(kind)
        return self.runs[kind]

    def make_run(self, kind: str) -> Watch:
        settings, others = RUNS[kind]
        chosen = [*settings, "samples=0"]
        if kind != "full":
            chosen.append(f"length={SHORT / self.cfg.steps:.4f}")
        # Earlier scripts lack some settings.
        chosen = [setting for setting in chosen if hasattr(self.cfg, re.split("[.=]", setting)[0])]
        folder = self.folder / kind
        copy_data(self.data, folder / self.data_name, others)
        script = folder / self.script.name
        script.write_bytes(self.script.read_bytes())
        watch = Watch(script, kind in ("full", "reseeded"))
        options = ["--preset", self.preset, "--seed", "1" if kind == "reseeded" else "0"]
        watch.run(folder, [*options, "--set", *chosen])
        return watch

    def add_noise(self) -> None:
        """Moves the normal run's weights, once, away from where so few steps have left them."""
        watch = self.run("normal")
        if self.is_noisy:
            return
        self.is_noisy = True
        generator = torch.Generator().manual_seed(1)
        for t in watch.weights():
            if t.is_floating_point():
                t += NOISE * torch.randn(t.shape, generator=generator)
        watch.model.lm_head.data *= SHARPER

    def text(self) -> np.ndarray:
        """Returns the tokens of the first validation slice and a last target, with four documents or more."""
        T = self.cfg.val_slice_tokens
        tokens = find_tokens(self.data, "val")[: T + 1].copy()
        tokens[[T // 5, T // 2 + 5, T // 2 + 6]] = self.cfg.bos_id
        return tokens

    def batch(self, tokens: np.ndarray):
        """Returns tokens as a slice of a validation, as the script makes it."""
        watch = self.run("normal")
        header = np.fromfile(next(self.data.glob("[!.]*_val_*.bin")), "<i4", 256)
        header[2] = len(tokens)
        path = self.folder / "text_val_000000.bin"
        path.write_bytes(header.tobytes() + tokens.astype("<u2").tobytes())
        cfg = replace(watch.model.cfg, val_slices=1, val_slice_tokens=len(tokens) - 1)
        return watch.tg.ValLoader(cfg, [path]).slice(0)

    def losses(self, batch) -> Tensor:
        watch = self.run("normal")
        return watch.token_losses(watch.model, batch, *watch.options).double()


# ---- What a loss is ----------------------------------------------------------------------------------------


def first_change(
    before: Tensor, after: Tensor, must_stay: Tensor, tolerance: float = LOSS_TOLERANCE
) -> int | None:
    """Returns the first position whose loss must stay, and does not."""
    is_same = torch.isclose(before, after, rtol=tolerance, atol=tolerance)
    places = (must_stay & ~is_same).nonzero()
    return int(places[0]) if len(places) else None


def check_causal(case: Case) -> str:
    """Replaces the tokens after a cut: where documents begin and end, where windows do, anywhere. First
    documents stay as long as they are, and then they do not.
    """
    case.add_noise()
    tokens = case.text()
    T = len(tokens) - 1
    batch = case.batch(tokens)
    before = case.losses(batch)
    rng = np.random.default_rng(3)
    cuts = {T - 1, *rng.integers(0, T, 30).tolist(), *(2 ** np.arange(20) - 1).tolist()}
    for start in np.flatnonzero(tokens == case.cfg.bos_id)[:8].tolist():
        cuts.update(range(start - 2, start + 3))
    for cut in sorted(cuts & set(range(T))):
        changed = tokens.copy()
        changed[cut + 1 :] = rng.integers(0, case.cfg.vocab_size, T - cut)
        is_end = (tokens == case.cfg.bos_id) | (changed == case.cfg.bos_id)
        same_ends = np.where(is_end, tokens, changed)
        for text, tolerance in ((same_ends, LOSS_TOLERANCE), (changed, OTHER_ENDS_TOLERANCE)):
            # With the targets of before. So the loss at the cut must stay too, though the next input is
            # another.
            after = case.losses(case.batch(text)._replace(targets=batch.targets))
            place = first_change(before, after, torch.arange(T) <= cut, tolerance)
            if place is not None:
                change = after[place] - before[place]
                return f"broken: other tokens from {cut + 1} on change the loss at {place} by {change:.2g}"
    return OK


def check_targets(case: Case) -> str:
    case.add_noise()
    batch = case.batch(case.text())
    before = case.losses(batch)
    generator = torch.Generator().manual_seed(4)
    for share in (0.5, 0.05):
        is_other = torch.rand(len(before), generator=generator) < share
        others = torch.randint(case.cfg.vocab_size, is_other.shape, generator=generator)
        after = case.losses(batch._replace(targets=torch.where(is_other, others, batch.targets)))
        place = first_change(before, after, ~is_other)
        if place is not None:
            return f"broken: the loss at {place} changes with the targets at other positions"
    return OK


def check_probability(case: Case) -> str:
    """Sums exp(-loss) over all targets. With few tokens it does so at every position of a text. Otherwise a
    document of three tokens is repeated, and each copy has other targets.
    """
    case.add_noise()
    bos_id = case.cfg.bos_id
    text = case.text()[:-1][:512]
    copies = 1
    skipped = 0
    if case.cfg.padded_vocab > FEW_TOKENS:
        copies = len(text) // 3
        skipped = 4  # the first copies see other tokens before them
        text = np.array([bos_id, text[1], text[1]])
    batch = case.batch(np.append(np.tile(text, copies), bos_id))
    parts = []
    for chunk in torch.arange(case.cfg.padded_vocab).split(copies - skipped):
        targets = batch.targets.clone().view(copies, len(text))
        asked = slice(skipped, skipped + len(chunk))
        targets[asked] = chunk[:, None]
        losses = case.losses(batch._replace(targets=targets.flatten()))
        parts.append(torch.exp(-losses.view(targets.shape)[asked]))
    probs = torch.cat(parts)  # (padded_vocab, positions)
    sums = probs.sum(0)
    place = int(sums.argmax())
    if not sums[place] <= 1 + SUM_TOLERANCE:
        return f"broken: at position {place} the probabilities of all targets sum to {sums[place]:.4f}"
    real = probs[: case.cfg.vocab_size].sum(0)
    return f"{OK}: sums of {sums.min():.4f} to {sums.max():.4f}, without padding {real.min():.4f} or more"


# ---- What a run does ---------------------------------------------------------------------------------------


def logged_end(watch: Watch) -> tuple[float, float]:
    """Returns the last validation's loss in the log, and the seconds of training."""
    loss, ms = re.findall(r"\nstep:\S+ val_loss:(\S+) train_time:(\d+)ms", watch.log)[-1]
    return float(loss), float(ms) / 1000


def check_validation(case: Case) -> str:
    """Compares what the last validation asked for with the shard, and its losses with those of one slice."""
    watch = case.run("normal")
    T = case.cfg.val_slice_tokens
    tokens = find_tokens(case.data, "val").astype(np.int64)
    count = min(case.cfg.val_slices, (len(tokens) - 1) // T)
    slices = [tokens[i * T : (i + 1) * T + 1] for i in range(count)]
    wanted = [(part[:-1].tobytes(), part[1:].tobytes()) for part in slices]
    losses = dict(watch.asked)
    found = (Counter(wanted) & Counter(key for key, _ in watch.asked)).total()
    if not found == len(watch.asked) == count:
        return f"broken: validation took {found} of the {count} slices, in {len(watch.asked)} forwards"
    mean = sum(loss for _, loss in watch.asked) / count  # two slices may be equal
    logged, _ = logged_end(watch)
    if not abs(mean - logged) <= SUM_TOLERANCE:
        return f"broken: the log has a loss of {logged}, the slices have a mean of {mean:.4f}"
    for i in (count - 1, count // 2, 0):
        alone = case.losses(case.batch(slices[i])).mean().item()
        if not abs(alone - losses[wanted[i]]) <= SUM_TOLERANCE:
            return f"broken: slice {i} had a loss of {losses[wanted[i]]:.4f}, and alone it has {alone:.4f}"
    data = re.findall(r"\ndata: .*", watch.log)[-1]
    if case.log is not None and data not in case.log_text:
        return "not shown: the log's data are not the ones here"
    return f"{OK}: {count * T:,} tokens"


def depends(case: Case, kind: str, other: str) -> bool:
    """Tells whether two runs differ. Raises RuntimeError if they would without a cause."""
    changed = case.run("changed").outcome
    if changed == case.run("normal").outcome:
        return False
    is_random = changed != case.run("changed again").outcome
    if is_random and other != "changed again":
        raise RuntimeError("the same run twice differs")
    return case.run(kind).outcome != case.run(other).outcome


def check_blind(case: Case) -> str:
    if depends(case, "with warm-up", "with warm-up and validation"):
        return "broken: training depends on the validation's tokens, or on how often it happens"
    return OK


def check_warm_up(case: Case) -> str:
    if case.run("normal").checksum_at_start != case.run("full").checksum_at_start:
        return "broken: before the first step the weights depend on the warm-up or on the data"
    if depends(case, "changed", "with warm-up"):
        return "broken: without the warm-up the losses differ"
    return OK


def batches_of(case: Case, rank: int, processes: int) -> list[bytes]:
    """Returns the inputs of a process's micro-batches in a short run."""
    watch = case.run("normal")
    cfg = watch.model.cfg
    loader = watch.tg.TrainLoader(cfg, sorted(case.data.glob("[!.]*_train_*.bin")), rank, processes)
    found = []
    for step in range(cfg.steps):
        for part in loader.micro_batches(watch.tg.plan_step(cfg, step)):
            found.append(bytes(part.inputs.numpy()))
    loader.close()
    return found


def check_reproducible(case: Case) -> str:
    """Compares equal runs, the start of one with another seed, and the batches of one and two processes."""
    if depends(case, "changed", "changed again"):
        return "broken: the same seed twice gives other losses or weights"
    if case.run("full").checksum_at_start == case.run("reseeded").checksum_at_start:
        return "broken: another seed gives the same weights before the first step"
    alone = batches_of(case, 0, 1)
    is_shared = case.cfg.microbatches % 2 == 0
    if is_shared and (alone[::2] != batches_of(case, 0, 2) or alone[1::2] != batches_of(case, 1, 2)):
        return "broken: in 2 processes the batches are others"
    return OK


def check_clock(case: Case) -> str:
    for kind in ("normal", "changed"):
        watch = case.run(kind)
        seconds = watch.seconds()
        _, logged = logged_end(watch)
        if logged < seconds * (1 - CLOCK_TOLERANCE) - CLOCK_TOLERANCE:
            return f"broken: the log has {logged:.3f} s of training, it took {seconds:.3f} s"
    return OK


def place_keys(tokens: np.ndarray, bos_id: int) -> np.ndarray:
    """Returns a key, uint64, of every PLACE neighbours in one document."""
    count = max(0, len(tokens) - PLACE + 1)
    keys = np.zeros(count, np.uint64)
    is_inside = np.ones(count, bool)
    for k in range(PLACE):
        part = tokens[k : k + count]
        keys = keys * MULTIPLIER + part.astype(np.uint64)
        if k:
            is_inside &= part != bos_id
    return keys[is_inside]


def check_once(case: Case) -> str:
    """Runs all steps without training, on shards whose tokens tell their place: none may come twice. In a
    normal run a batch may go through the model once.
    """
    bos_id = case.cfg.bos_id
    watch = case.run("full")
    found = []
    steps = []
    for step, parts in enumerate(watch.given, 1):
        for part in parts:
            found.append(place_keys(part, bos_id))
            steps.append(np.full(len(found[-1]), step))
    keys = np.concatenate(found)
    at = np.concatenate(steps)
    _, first, counts = np.unique(keys, return_index=True, return_counts=True)
    if (counts > 1).any():
        again = at[keys == keys[first[counts > 1].min()]]
        return f"broken: tokens of step {again[0]} come again in step {again[1]}"
    shards = case.folder / "full" / case.data_name
    is_known = np.isin(keys, place_keys(find_tokens(shards, "train"), bos_id))
    if not is_known.all():
        return f"broken: step {at[~is_known][0]} has tokens that are not of the training shards"
    normal = case.run("normal")
    for step, (given, forwarded) in enumerate(zip(normal.given, normal.forwarded), 1):
        if forwarded and Counter(map(bytes, given)) != Counter(map(bytes, forwarded)):
            return f"broken: in step {step} the model does not get each micro-batch once"
    if depends(case, "normal", "with warm-up and validation"):
        return "broken: training depends on text that it has not come to"
    if case.log is not None and "\nepochs: 1\n" not in case.log_text:
        return "broken: the log does not say `epochs: 1`"
    return OK


# ---- What the log says -------------------------------------------------------------------------------------


def check_constants(case: Case) -> str:
    """Compares the settings of the script's preset, and of the log, with the track's."""
    found = tracks.differences(case.preset, vars(case.cfg), is_listed=True)
    config = re.search(r"\nconfig: (\{.*\})\n", case.log_text)
    if config:
        found += tracks.differences(case.preset, json.loads(config[1]), is_listed=True)
    if found:
        return f"broken: {', '.join(found)}"
    return OK


def check_script(case: Case) -> str:
    if case.log is None:
        return "not shown: give its log by --log"
    script, _, rest = case.log_text.partition(f"\n{'=' * 100}\n")
    if script != case.script.read_text(encoding="utf-8"):
        return "broken: the log has another script"
    commits = re.findall(r"\ncommit: (\w+)", "\n" + rest)
    name = f"{[*commits, 'HEAD'][0]}:./{case.script.name}"
    # With GIT_DIR git would look into another repository.
    command = ["env", "-u", "GIT_DIR", "-u", "GIT_WORK_TREE", "git", "cat-file", "blob", name]
    git = subprocess.run(command, cwd=case.script.parent, capture_output=True)
    if git.stdout != case.script.read_bytes():
        return f"not shown: there is no commit {name} of this script; commit it before the runs"
    return OK


# In the order in which they run: some need the weights as training left them, others with noise.
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


def judge(case: Case, rules: Sequence[str] = RULES) -> dict[str, str]:
    """Returns what the table says of each of `rules`, and prints it when it is known."""
    results = {}
    for rule, check in tqdm(CHECKS.items(), "rules", disable=None):
        if rule in rules:
            try:
                results[rule] = check(case)
            except Exception as error:  # the script lacks what the rule needs, or its run fails
                results[rule] = f"not shown: {type(error).__name__}: {error}".splitlines()[0]
            tqdm.write(row(rule, results[rule]))
    return results
