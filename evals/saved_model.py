"""Loads a model that `./run.sh --save MODEL` has written: for the scripts here, and for `import`."""

import json
import os
import re
import sys
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import train_gpt as tg


class NgramFiles(NamedTuple):
    """The n-gram table of a saved model, row r in file r % files: a fetch reads no other rows."""

    blocks: list[np.ndarray]  # of each file: rows (n, bytes of a row) uint8, mapped
    dtype: torch.dtype
    device: torch.device | str

    def fetch(self, row_ids: Tensor) -> Tensor:
        """Returns rows (n,) of the table, (n, width)."""
        places, owners = np.divmod(row_ids.cpu().numpy(), len(self.blocks))
        rows = np.empty((len(owners), self.blocks[0].shape[1]), np.uint8)
        for i, block in enumerate(self.blocks):
            rows[owners == i] = block[places[owners == i]]
        fetched = torch.from_numpy(rows).view(self.dtype)
        tg.require(fetched.isfinite().all(), "the model's n-gram rows are not finite: its training diverged")
        return fetched.to(self.device)


def map_rows(path: str, run_id: str, rank: int, count: int, row_bytes: int) -> np.ndarray:
    """Maps a rank's file of `count` rows. It ends with the id of the run that wrote it, and the rows' CRC-32,
    which begins with the rank.

    Files of earlier scripts lack the CRC-32. Reads the file once.
    """
    fix = "copy and rename all files of a model together"
    with tg.user_error_on(f"cannot read {path}", fix, OSError, ValueError):
        file = np.memmap(path, np.uint8, "r")
    rows, end = np.split(file, [count * row_bytes])
    ends = f"{run_id}".encode(), f"{run_id}{zlib.crc32(rows, rank):08x}".encode()
    tg.require(end.tobytes() in ends, f"{path} is damaged, or another model's; {fix}")
    return rows.reshape(count, row_bytes)


# Settings in models of earlier scripts, and their names today. None: it says nothing of a model. Shapes and
# initial values were expressions in text, which must never be evaluated: the weights have the shapes.
RENAMED = {
    "delay_head_grad": None,
    "endings": "averages",
    "layers.bigram": "ngram",
    "layers.connections": "mudd",
    "mudd_connections": "mudd_weights",
    "ngrams.every": "update_every",
    "params.every": "update_every",
    "params.init": None,
    "params.shape": None,
    "params.tied_to": None,
    "params.work": "update_order",
    "rails_step": "two_momenta_from",
    "second_cadence_from": "late_updates_from",
    "stages.candidates": "sampled_columns",
}
# Old kinds of parameters, and ParamSpec.kind and .rows_by today.
RENAMED_KINDS = {
    "matmul": ("head", ""),
    "table": ("embedding", ""),  # its row has a rows_by
    "tokens": ("embedding", "inputs"),
    "hashed": ("embedding", "hashed_rows"),
}
RENAMED_KERNELS = {"both_layouts": "cast_and_transpose", "gram": None}  # None: it is gone
# Settings that models of earlier scripts lack, with the values that they had in effect, if it is another than
# False. A field of Layer is "layers.NAME".
ADDED = {
    "pointer_dim": 0,
    "pointer_window": 1,
    "pointer_val_window": 1,
    "softcap": {"scale": 23.0, "shift": 5.0, "span": 7.5},
    "ngrams.contexts": (),
    "device": "gpu",
}


def rename(settings, path: str = ""):
    """Gives a nest of JSON today's names. `path` is its own old name with a dot, without numbers of rows."""
    if isinstance(settings, list):
        return [rename(row, path) for row in settings]
    if not isinstance(settings, dict):
        return settings
    renamed = {}
    for old, value in settings.items():
        new = RENAMED.get(path + old, old)
        if new is not None:
            renamed[new] = rename(value, f"{path}{old}.")
    return renamed


def single_setting(name: str, value, field: tg.SettingType):
    """Returns the value of a setting, given as JSON has it. Raises UserError if it cannot have this value."""
    if field.size is not None:
        value = tuple(value)
    tg.require(field.allows(value), f"{name} cannot be {value}")
    return value


def config_from_dict(values: dict, table=tg.Config, path: str = "") -> tg.Config:
    """Builds a Config from a dict of its fields, as JSON gives it, and of ADDED. `path` is its name in there.

    A switch that the dict lacks is off: models of earlier scripts were trained without it. Raises KeyError if
    a field is unknown, UserError if one is missing or cannot have such a value.
    """
    fields = {}
    for name in tg.setting_hints(table) | values:
        hint = tg.setting_hints(table)[name]
        row = tg.group_type(hint)
        missing = ADDED.get(path + name)
        if missing is None and row is None and tg.setting_type(hint).type is bool:
            missing = False
        value = values.get(name, missing)
        tg.require(
            value is not None,
            f"no setting {path}{name}; if it is new, give it an entry of ADDED in evals/saved_model.py",
        )
        if row is None:
            fields[name] = single_setting(name, value, tg.setting_type(hint))
        elif isinstance(value, list):
            rows = []
            for item in value:
                rows.append(config_from_dict(item, row, f"{path}{name}."))
            fields[name] = tuple(rows)
        else:
            fields[name] = config_from_dict(value, row, f"{path}{name}.")
    return table(**fields)


def read_config(text: str) -> tg.Config:
    """Returns the config of a saved model's JSON, whichever script wrote it. Raises an error if it cannot."""
    values = rename(json.loads(text))
    kernels = []
    for old in values["kernels"]:
        new = RENAMED_KERNELS.get(old, old)
        if new is not None:
            kernels.append(new)
    values["kernels"] = kernels
    for row in values["params"]:
        row["kind"], rows_by = RENAMED_KINDS.get(row["kind"], (row["kind"], ""))
        row.setdefault("rows_by", rows_by)
    return config_from_dict(values)


def check_sizes(weights: dict[str, Tensor], cfg: tg.Config, file_bytes: int) -> None:
    """Raises UserError for sizes that a model's file cannot mean, before any memory is taken.

    The weights must have the config's shapes, and room in the file, where few numbers may be shown as a large
    tensor. What does not follow from the shapes has a limit, twice the record preset's or more.
    """
    width = cfg.ngrams.width if cfg.ngrams.orders else cfg.dim
    wanted = tg.param_shapes(cfg, 1) | {"signs": (cfg.sign_rows, width)}
    shapes = {}
    size = 0
    for name, t in weights.items():
        shapes[name] = tuple(t.shape)
        size += t.nbytes
    different = tg.differences(wanted, shapes)
    tg.require(not different, f"its settings do not have the shapes of {different}")
    tg.require(size <= file_bytes, "its weights are larger than the file")
    longest = cfg.val_slice_tokens
    for stage in cfg.stages:
        longest = max(longest, stage.batch_tokens // cfg.microbatches)
    window = max(tg.window_tokens(cfg, cfg.val_windows).values())
    limits = {
        "tokens in a sequence": (longest, 1 << 20),
        "tokens in an n-gram": (max(cfg.ngrams.orders, default=0), 256),
        "groups of channels": (cfg.mix_groups, cfg.dim),
        "logits at once": (min(cfg.head_chunk, longest) * cfg.padded_vocab, 1 << 30),
        "attention scores at once": (cfg.heads * longest * min(window, longest), 1 << 33),
        "rotary angles": (longest * cfg.head_dim // 2, 1 << 27),
    }
    for what, (count, most) in limits.items():
        tg.require(count <= most, f"it has {count} {what}, more than {most}")
    tg.require(cfg.steps, "all its stages have 0 steps")


def token_losses(model: tg.GPT, batch: tg.MicroBatch) -> np.ndarray:
    """Returns the validation losses of a batch that tg.pack packed, (T,) float64.

    Raises UserError if any is not finite: it would make sums of losses, or which is the least, meaningless.
    """
    windows = tg.window_tokens(model.cfg, model.cfg.val_windows)
    losses = model.token_losses(tg.move(batch, model.device), windows)
    tg.require(losses.isfinite().all(), "a loss is not finite: the model's training diverged")
    return losses.double().cpu().numpy()


def load_model(path: str, device: torch.device | str = "cpu") -> tg.GPT:
    """Loads the model that `--save` wrote; it gives the same validation loss.

    model.vocabulary_hash and model.data_fingerprint are of its training data; "" if they are unknown.
    """
    fix = (
        "only what --save of this script wrote can be loaded; models of scripts before commit 1b4b4c9 "
        "(2026-11-26) load with the evals/ of their own commit, which their run's log names"
    )
    saved = tg.read_saved(path, fix)
    # Which exception it is depends on the script that wrote it.
    with tg.user_error_on(f"cannot load {path}", fix, Exception):
        config = saved["config"]
        weights = saved["weights"]
        run_id = saved["id"]
        script = saved.get("script", tg.source_hash())
        tg.require(re.fullmatch(r"\w+", run_id + script, re.ASCII), "its id or its script is no name")
        of_data = str(saved.get("vocabulary", "")), str(saved.get("data", ""))
        ranks = range(saved["ranks"])
        with tg.user_error_on(
            "it has a setting or parameter that train_gpt.py lacks",
            "a changed copy of the script trained it: put that copy in the place of train_gpt.py",
            KeyError,
        ):
            cfg = read_config(config)
            check_sizes(weights, cfg, Path(path).stat().st_size)
        model = tg.GPT(cfg, device=device)
        model.load_state_dict(weights)
        model.vocabulary_hash, model.data_fingerprint = of_data  # type: ignore
        if cfg.ngrams.orders:
            _, count = tg.ngram_sizes(cfg, len(ranks))
            dtype = tg.dtype_of(cfg.ngrams.dtype)
    if script != tg.source_hash():
        print(
            f"{path}: another train_gpt.py trained it (sha256 {script}); if that computes something "
            "else, put it in the place of this one",
            file=sys.stderr,
        )
    for name, values in weights.items():
        tg.require(values.isfinite().all(), f"{path}: {name} is not finite: its training diverged")
    if cfg.ngrams.orders:
        row_bytes = cfg.ngrams.width * dtype.itemsize
        saved_path = str(path)
        if not os.path.exists(f"{path}.ngrams0"):  # a link to a model has its rows beside the model
            saved_path = os.path.realpath(path)
        blocks = []
        for rank in ranks:
            blocks.append(map_rows(f"{saved_path}.ngrams{rank}", run_id, rank, count, row_bytes))
        model.ngrams = NgramFiles(blocks, dtype, device)
    model.use_rotary(max(i for i, stage in enumerate(cfg.stages) if stage.steps))
    return model
