"""Makes all calls of train_gpt.Collectives on real ranks, and trains by them: the step "nccl" of check.py."""

import json
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

import train_gpt as tg

Calls = Iterator[tuple[str, Tensor, Tensor]]  # a call's name, its result, and what that must be, to the bit


def dense_calls(comm: tg.Collectives, every: Tensor, name: str) -> Calls:
    """Exchanges the ranks' gradients: every (ranks, ...)."""
    mean = every.float().mean(0)
    grad = every[comm.rank]
    whole = every[0]
    wanted = comm.block(mean)
    yield f"reduce_scatter {name}", comm.reduce_scatter("p", grad.clone()).wait(), wanted.to(every.dtype)
    result = comm.reduce_scatter("p", grad.clone(), in_rank_order=True).wait()
    yield f"all_to_all {name}, summed in fp32", result.float(), wanted
    own = torch.full_like(whole, -1.0)
    comm.block(own).copy_(comm.block(whole))
    yield f"gather {name}", comm.all_gather("p", own).wait(), whole


def calls_alone(comm: tg.Collectives, grad: Tensor, name: str) -> Calls:
    """Makes the calls that Collectives leaves out where there is one rank, with its arguments."""
    out = grad.clone()
    dist.all_reduce(out, **comm.options).wait()
    yield f"all_reduce {name}, alone", out, grad
    for call in (tg._reduce_scatter, tg._all_gather, dist.all_to_all_single):
        options = dict(comm.options)
        if call is tg._reduce_scatter:
            options["op"] = dist.ReduceOp.AVG
        out = torch.zeros_like(grad)
        call(out, grad, **options).wait()
        yield f"{call.__name__} {name}, alone", out, grad


def sparse_calls(comm: tg.Collectives, every: Tensor, name: str) -> Calls:
    """Exchanges the rows that ranks touched, and their numbers. Each rank owns two."""
    rank = comm.rank
    n = comm.world_size
    grad = every[rank]
    touches = torch.stack([torch.arange(2 * n) % (r + 2) == 0 for r in range(n)])
    touches[:, 1] = True
    for case, empty_ranks in {"uneven": 0, "one rank empty": 1, "all empty": n}.items():
        touches[:empty_ranks] = False
        row_ids = touches[rank].nonzero()[:, 0].int()
        owner, local_row = np.divmod(row_ids.numpy(), 2)
        plan = tg.route_rows(comm, "tokens", row_ids.numpy(), owner, local_row)
        plan = tg.move(tg.pack(plan), grad.device)
        senders, owned = touches[:, 2 * rank : 2 * rank + 2].nonzero().unbind(1)
        yield f"row ids with {name}, {case}", plan.local_row_ids, owned.to(plan.local_row_ids)
        rows = grad[plan.row_ids]
        if case == "uneven":  # into a buffer, as n-grams are fetched
            out = grad.new_empty((sum(plan.output_splits), *grad.shape[1:]))
            sent = comm.all_to_all("rows", "p", rows, plan.input_splits, plan.output_splits, out).wait()
            yield f"rows {name}, {case}", sent, every[senders, 2 * rank + owned]
        mean = (every.float() * touches.to(every.device)[:, :, None, None]).mean(0)
        result = tg.reduce_row_grads(
            comm, tg.TORCH_BACKEND, "p", rows, plan, torch.zeros_like(comm.block(mean))
        ).wait()
        yield f"sparse {name}, {case}", result, comm.block(mean)


def exchange_calls(comm: tg.Collectives) -> Calls:
    """Makes every call of Collectives, on small integers, whose sums are exact in any order."""
    n, device = comm.world_size, comm.device
    for dtype in (torch.bfloat16, torch.float32):
        drawn = []
        for rank in range(n):
            generator = torch.Generator().manual_seed(rank)
            drawn.append(torch.randint(-8, 9, (2 * n, 5, 8), generator=generator))
        every = torch.stack(drawn).to(device, dtype)
        name = str(dtype).removeprefix("torch.")
        yield from dense_calls(comm, every, name)
        yield from sparse_calls(comm, every, name)
        if n == 1:
            yield from calls_alone(comm, every[0], name)
    total = comm.all_reduce(torch.full((3,), comm.rank + 1.0, device=device)).wait()
    yield "all_reduce", total, torch.full_like(total, n * (n + 1) / 2)
    yield "from_rank_0", torch.tensor(comm.from_rank_0(comm.rank + 1)), torch.tensor(1)


def train_small(cfg: tg.Config, comm: tg.Collectives, prefetch: tg.Collectives, shard: Path) -> list[Tensor]:
    """Trains all steps with deterministic operations. Returns the parameters, and the table of n-grams."""
    model, optimizer = tg.build(cfg, tg.TORCH_BACKEND, comm, 0)
    loader = tg.TrainLoader(cfg, [shard], comm.rank, comm.world_size)
    plans = (tg.plan_step(cfg, step) for step in range(cfg.steps))
    batches = tg.Prefetcher(loader, plans, prefetch)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        for _ in range(cfg.steps):
            tg.train_step(model, optimizer, batches.next(), batches.peek)
    loader.close()
    optimizer.wait()
    tensors = list(model.parameters()) + list(optimizer.ngrams.state_dict().values())
    return [t.detach().to(comm.device) for t in tensors]


def exchange_rank(rank: int, world_size: int, on_gpu: bool, cfg: tg.Config, shard: Path) -> None:
    """Runs as one rank. Writes a line for every call beside `shard`: its name, and whether it was right.

    With several ranks it also trains `cfg` with dense exchange, which must give the bits of sparse exchange.
    """
    backend = "gloo"
    device = torch.device("cpu")
    timeout = timedelta(seconds=60)
    options: dict[str, Any] = {"rank": rank, "world_size": world_size, "timeout": timeout}
    if on_gpu:
        backend = "nccl"
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
        options["device_id"] = device
    dist.init_process_group(backend, init_method=f"file://{shard.parent}/store", **options)
    comm = tg.Collectives(rank, world_size, device=device)
    # The prefetch thread's, as in a run.
    prefetch = tg.Collectives(rank, world_size, dist.new_group(backend="gloo", timeout=timeout))
    cfg = tg.override(cfg, "params.*.reduction=fp32")
    dense = []
    for spec in cfg.params:
        if spec.kind == "embedding":
            spec = replace(spec, exchange="reduce_scatter")
        dense.append(spec)
    with open(shard.with_name(f"rank{rank}.jsonl"), "w", buffering=1) as file:
        for name, result, wanted in exchange_calls(comm):
            file.write(json.dumps([name, torch.equal(result, wanted)]) + "\n")
        trained = train_small(cfg, comm, prefetch, shard)
        if world_size > 1:
            others = train_small(replace(cfg, params=tuple(dense)), comm, prefetch, shard)
            right = bool(trained[-4].any())  # rows of n-grams begin at 0
            for own, other in zip(trained, others):
                right = right and torch.equal(own, other) and bool(own.isfinite().all())
            file.write(json.dumps([f"{cfg.steps} steps, dense as sharded and sparse", right]) + "\n")
    dist.destroy_process_group()
