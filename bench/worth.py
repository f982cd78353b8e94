"""Says what an idea is worth in time. bench/ablations.py prints it, and its help explains the estimate."""

import importlib.util
import itertools
import math
import sys
from collections.abc import Sequence
from functools import reduce
from pathlib import Path
from statistics import mean, stdev
from types import ModuleType
from typing import NamedTuple

import numpy as np
import torch

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))
import train_gpt as tg

SHORTER = 0.8  # of the baseline's steps, in the runs that show what steps are worth
WARM_UP = 2  # steps that are not timed
PAIRS = 6  # of timed steps, in each stage
COPIES = itertools.count()


class Side(NamedTuple):
    """What is timed: a script, with these settings of a preset."""

    script: Path
    settings: list[str]


def paired(losses: Sequence[float], base: Sequence[float]) -> tuple[float, float, float]:
    """Returns the mean of losses - base, pair by pair, its standard error, and p; nan: undefined."""
    from scipy.stats import ttest_rel

    differences = [round(a - b, 9) for a, b in zip(losses, base, strict=True)]  # equal ones shall be equal
    if len(set(differences)) == 1:  # one pair, or pairs without spread
        return differences[0], math.nan, math.nan
    error = stdev(differences) / math.sqrt(len(differences))
    return mean(differences), error, float(ttest_rel(losses, base).pvalue)


def import_copy(path: Path) -> ModuleType:
    # The script defines operations under its module's name, so each copy needs another name.
    spec = importlib.util.spec_from_file_location(f"{path.stem}_{next(COPIES)}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def timer_of(script: Path) -> ModuleType:
    """Imports bench/step_time.py again, with `script` in place of the train_gpt.py that it times."""
    sys.modules["train_gpt"] = import_copy(script)
    try:
        return import_copy(REPOSITORY / "bench" / "step_time.py")
    finally:
        sys.modules["train_gpt"] = tg


def time_ratios(preset: str, base: Side, variant: Side) -> np.ndarray:
    """Returns PAIRS ratios of the variant's time of a whole run to the baseline's, by alternate steps."""
    torch.set_num_threads(1)  # as the runs have
    timers = []
    configs = []
    for script, settings in (base, variant):
        timer = timer_of(script)
        timers.append(timer)
        configs.append(reduce(timer.tg.override, settings, timer.tg.PRESETS[preset]))
    device = torch.device("cpu")
    if configs[0].device == "gpu" and torch.cuda.is_available():  # as train_gpt.py chooses
        device = torch.device("cuda", 0)
    ms = np.zeros((2, PAIRS))
    for stage in range(max(len(cfg.stages) for cfg in configs)):
        trainings = {}
        for side in (0, 1):
            cfg = configs[side]
            if stage < len(cfg.stages) and cfg.stages[stage].steps:  # a variant may have other stages
                paths = timers[side].tg.find_shards(cfg.data, "train")
                timed = timers[side].Variant("", cfg, device)
                trainings[side] = timers[side].Training(timed, stage, 1, paths, WARM_UP + 2 * PAIRS)
                trainings[side].warm_up(WARM_UP)
        for _ in range(2 * PAIRS):
            for training in trainings.values():
                training.step()
        for side, training in trainings.items():
            training.loader.close()
            ms[side] += training.cfg.stages[stage].steps * training.pairs()
    return ms[1] / ms[0]


def less_or_more(ratio: float) -> str:
    word = "less" if ratio < 1 else "more"
    return f"{100 * abs(ratio - 1):.0f} % {word}"


def in_time(
    losses: Sequence[float], base: Sequence[float], short: Sequence[float], ratios: np.ndarray
) -> str:
    """Says what a variant is worth in time.

    losses, base, short: of the variant, of the baseline, and of the baseline with SHORTER of its steps, by
    seed. ratios: of the times of whole runs, variant to baseline.
    """
    from scipy.stats import t

    low, ratio, high = np.quantile(ratios, (0.25, 0.5, 0.75))
    ratio_error = (high - low) / math.sqrt(len(ratios))
    text = f"its steps take {ratio:.3f} +- {ratio_error:.3f} of the time; "
    if len(base) == 1:
        return text + "one seed: no estimate of the time to the baseline's loss"
    slope, slope_error, _ = paired(short, base)
    if not slope > 0 or slope < 2 * slope_error:
        return text + "what steps are worth is not resolved: more --seeds estimate the time"
    share = mean(losses) - mean(base)
    share /= slope
    # The error of a quotient of two means over the same seeds.
    rest = np.subtract(losses, base) - share * np.subtract(short, base)
    share_error = rest.std(ddof=1) / math.sqrt(len(rest)) / slope
    log_time = math.log(ratio) - share * math.log(SHORTER)
    of_loss = share_error * math.log(SHORTER)
    of_time = ratio_error / ratio
    error = math.hypot(of_loss, of_time)
    # Degrees of freedom of such a sum (Welch 1947).
    parts = of_loss**4 / (len(base) - 1) + of_time**4 / (len(ratios) - 1)
    margin = t.ppf(0.975, error**4 / parts) * error if parts else 0.0
    guess = less_or_more(math.exp(log_time))
    interval = f"{less_or_more(math.exp(log_time - margin))} to {less_or_more(math.exp(log_time + margin))}"
    if abs(log_time) < margin:
        if paired(losses, base)[2] < 0.05:
            alone = less_or_more(SHORTER**-share)
            text += f"the loss alone is worth about {alone} time; with that of the steps, "
        text += f"time to the baseline's loss: {interval} (95 %), best guess {guess}: undecided"
    else:
        text += f"about {guess} time to the baseline's loss, in {100 * SHORTER**-share:.0f} % of the steps "
        text += f"(95 %: {interval})"
    if abs(share) > 1:
        text += ", extrapolated"
    if share < -1:
        text += ". So large a gain is often a look at the future: python records/referee.py COPY.py"
    return text
