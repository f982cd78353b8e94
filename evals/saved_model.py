"""Loads a model that `./run.sh --save MODEL` has written: for the scripts here, and for `import`."""

import json
import sys
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
        return torch.from_numpy(rows).view(self.dtype).to(self.device)


def map_rows(path: str, run_id: str, count: int, row_bytes: int) -> np.ndarray:
    """Maps a file of `count` rows, which ends with the id of the run that wrote it."""
    fix = "copy and rename all files of a model together"
    with tg.user_error_on(f"cannot read {path}", fix, OSError, ValueError):
        file = np.memmap(path, np.uint8, "r")
    size, end = count * row_bytes, run_id.encode()
    tg.require(
        len(file) == size + len(end) and file[size:].tobytes() == end, f"{path} is another model's; {fix}"
    )
    return file[:size].reshape(count, row_bytes)


# The fields that models saved by an earlier script lack; others that they have say nothing of a model.
EARLIER = {
    "pointer_dim": 0,
    "pointer_window": 1,
    "pointer_val_window": 1,
    "softcap": {"scale": 23.0, "shift": 5.0, "span": 7.5},
}


def load_model(path: str, device: torch.device | str = "cpu") -> tg.GPT:
    """Loads the model that `--save` wrote; it gives the same validation loss."""
    fix = "give a file that --save of this script wrote"
    saved = tg.read_saved(path, fix)
    with tg.user_error_on(
        f"cannot load {path}", fix, Exception
    ):  # which one depends on the script that wrote it
        config = EARLIER | json.loads(saved["config"])
        config.pop("delay_head_grad", None)
        for row in config["params"]:
            row.pop("tied_to", None)
        cfg, run_id, ranks = tg.config_from_dict(config), saved["id"], saved["ranks"]
        model = tg.GPT(cfg, device=device)
        model.load_state_dict(saved["weights"])
    if cfg.ngrams.orders:
        _, count = tg.ngram_bounds(cfg, ranks)
        dtype = tg.dtype_of(cfg.ngrams.dtype)
        names = (f"{path}.ngrams{rank}" for rank in range(ranks))
        blocks = [map_rows(name, run_id, count, cfg.ngrams.width * dtype.itemsize) for name in names]
        model.ngrams = NgramFiles(blocks, dtype, device)
    model.use_stage(tg.plan_step(cfg, cfg.steps - 1).stage)
    return model
