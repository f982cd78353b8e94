"""Checks the row-sparse exchange of table gradients: it has the bits of the dense one.

test_distributed.py compares whole runs, and the bytes that they send.
"""

import numpy as np
import pytest
import torch

import train_gpt as tg
from golden_inputs import generator, same_bits

ROUNDS = 12
ROWS_PER_RANK = {"tokens": 8, "hashed": 40}
ROW_SHAPES = {  # kind of rows, and a row's shape
    "value_embeds": ("tokens", (3, 5)),
    "embed": ("tokens", (4,)),
    "bigram_embed": ("hashed", (7,)),
}


def draw(rank, world_size, dtype, i):
    """Draws this rank's touched rows by kind, and gradients by table, of sizes from 2^-16 to 2^16.

    It touches none, some or all of an owner's rows. In one round no rank touches any.
    """
    masks, grads, g = {}, {}, generator(1000 * i + rank)
    for kind, rows in ROWS_PER_RANK.items():
        shares = torch.tensor([0, 0, 0.3, 1])[torch.randint(0, 4, (world_size, 1), generator=g)]
        masks[kind] = (torch.rand(world_size, rows, generator=g) < shares * (i != 2)).flatten()
    for name, (kind, shape) in ROW_SHAPES.items():
        size = 2.0 ** torch.randint(-16, 17, (len(masks[kind]), *shape), generator=g)
        grads[name] = (torch.randn(size.shape, generator=g, dtype=torch.float64) * size).to(dtype)
        grads[name][~masks[kind]] = 0
    return masks, grads


def compare(rank, world_size, dtype):
    """Runs sparse exchanges beside dense ones, and checks their bits."""
    comm = tg.Collectives(rank, world_size)
    means = {name: torch.zeros((ROWS_PER_RANK[kind], *shape)) for name, (kind, shape) in ROW_SHAPES.items()}
    for i in range(ROUNDS):
        masks, grads = draw(rank, world_size, dtype, i)
        plans, pending = {}, {}
        for kind, mask in masks.items():
            rows = mask.nonzero().flatten().numpy()
            plans[kind] = tg.route_rows(comm, kind, rows, *np.divmod(rows, ROWS_PER_RANK[kind]))
        for name, (kind, _) in ROW_SHAPES.items():
            grad, plan = grads[name].clone(), plans[kind]
            grad[~masks[kind]] = torch.nan  # stale rows: must not be read
            pending[name] = tg.reduce_row_grads(
                comm, tg.TORCH_BACKEND, name, grad[plan.row_ids], plan, means[name]
            )
        for name in reversed(ROW_SHAPES):
            want = comm.reduce_scatter(name, grads[name], in_rank_order=True).wait()
            mean = pending[name].wait()
            assert mean.data_ptr() == means[name].data_ptr() and same_bits(mean, want), (i, name)
            mean.index_fill_(0, plans[ROW_SHAPES[name][0]].local_row_ids.long(), 0)  # as the optimizer does
            assert not mean.any()


@pytest.mark.parametrize("world_size, dtype", [(3, torch.bfloat16), (4, torch.float32)])
def test_touched_rows_are_averaged_like_all_rows(workers, world_size, dtype):
    """Compares them whichever rank touches which rows, in several exchanges in a row."""
    workers(world_size, compare, dtype)
