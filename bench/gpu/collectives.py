"""Makes every call of train_gpt.Exchange on real ranks: the step "nccl" of check.py."""

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import train_gpt as tg


def exchange_calls(exchange: tg.Exchange, device: torch.device) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Makes every call of Exchange; yields its name, its result, and what that must be, to the bit.

    Numbers are small integers, whose sums are exact in any order. One rank alone makes no reductions and
    gathers: they are called here with its arguments.
    """
    rank, n, options = exchange.rank, exchange.world_size, exchange.options
    for dtype in (torch.bfloat16, torch.float32):
        seeds = [torch.Generator().manual_seed(r) for r in range(n)]
        drawn = [torch.randint(-8, 9, (2 * n, 5, 8), generator=seed) for seed in seeds]
        every = torch.stack(drawn).to(device, dtype)
        mean, grad, whole, name = every.float().mean(0), every[rank], every[0], str(dtype)[6:]
        for how, wanted in (("all_reduce", mean), ("reduce_scatter", exchange.shard(mean))):
            yield f"{how} {name}", exchange.reduce("p", how, grad.clone()).wait(), wanted.to(dtype)
            buffer = grad.new_empty((n, *wanted.shape))
            result = exchange.reduce("p", how, grad.clone(), buffer).wait()
            yield f"{how} {name}, summed in fp32", result.float(), wanted
        own = torch.full_like(whole, -1.0)
        exchange.shard(own).copy_(exchange.shard(whole))
        yield f"gather {name}", exchange.gather("p", own).wait(), whole
        if n == 1:
            out, buffer = torch.empty_like(grad), grad.new_empty((1, *grad.shape))
            tg._reduce_scatter(out, grad, op=dist.ReduceOp.AVG, **options).wait()
            yield f"reduce_scatter {name}, alone", out, grad
            dist.all_reduce(out, dist.ReduceOp.AVG, **options).wait()
            yield f"all_reduce {name}, alone", out, grad
            tg._all_gather(out, exchange.shard(out), **options).wait()
            yield f"all_gather {name} in place, alone", out, grad
            for collective in (tg._all_gather, dist.all_to_all_single):
                collective(buffer.zero_().flatten(0, 1), grad, **options).wait()
                yield f"{collective.__name__} {name}, alone", buffer[0], grad
        touches = torch.stack([torch.arange(2 * n) % (r + 2) == 0 for r in range(n)])
        touches[:, 1] = True
        for case, empty_ranks in {"uneven": 0, "one rank empty": 1, "all empty": n}.items():
            touches[:empty_ranks] = False
            row_ids = touches[rank].nonzero()[:, 0].int()
            counts = touches[rank].view(n, 2).sum(1).tolist()
            places, recv_counts = exchange.send_ids("tokens", (row_ids % 2).numpy(), counts)
            owners = touches[:, 2 * rank : 2 * rank + 2].nonzero()[:, 1]
            yield f"row ids with {name}, {case}", torch.from_numpy(places), owners.int()
            both = counts, recv_counts
            plan = tg.RowRoutes(*both, torch.from_numpy(places).to(device))
            out = grad.new_empty((sum(recv_counts), *grad.shape[1:])) if case == "uneven" else None
            row_grads = exchange.send_rows("rows", "p", grad[row_ids.to(device)], *both, out).wait()
            result = torch.zeros_like(exchange.shard(mean))
            tg.mean_rows(result, row_grads, plan)
            wanted = (every.float() * touches.to(device)[:, :, None, None]).mean(0)
            yield f"sparse {name}, {case}", result, exchange.shard(wanted)
    total = exchange.all_reduce(torch.full((3,), rank + 1.0, device=device)).wait()
    yield "all_reduce", total, torch.full_like(total, n * (n + 1) / 2)
    yield "all_gather_object", torch.tensor(exchange.all_gather_object(rank)), torch.arange(n)


def train_small(
    cfg: tg.Config, exchange: tg.Exchange, prefetch: tg.Exchange, device: torch.device, shard: Path
) -> list[Tensor]:
    """Trains all steps with deterministic operations. Returns the parameters, and the table of n-grams."""
    model = tg.GPT(cfg, exchange.world_size, device)
    optimizer = tg.Optimizer(cfg, dict(model.named_parameters()), exchange)
    loader = tg.TrainLoader(cfg, [shard], exchange.rank, exchange.world_size)
    batches = tg.Prefetcher(loader, (tg.plan_step(cfg, step) for step in range(cfg.steps)), prefetch)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        for _ in range(cfg.steps):
            tg.train_step(model, optimizer, batches.next(), batches.peek)
    loader.close()
    optimizer.finish_gathers()
    trained = [p.detach() for p in model.parameters()]
    if table := optimizer.ngrams:
        table.finish()
        trained += [t.to(device) for t in table.stored]
    return trained


def exchange_rank(rank: int, world_size: int, on_gpu: bool, cfg: tg.Config, shard: Path) -> None:
    """Runs as one rank. Writes a line for every call beside `shard`: its name, and whether it was right.

    Also trains `cfg` with n-grams, sharded and in host memory; and, with several ranks, with sparse and with
    dense exchange.
    """
    device, timeout = torch.device("cpu"), timedelta(seconds=60)
    options: dict[str, Any] = {"rank": rank, "world_size": world_size, "timeout": timeout}
    if on_gpu:
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
        options["device_id"] = device
    elif sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    backend, store = "nccl" if on_gpu else "gloo", f"file://{shard.parent}/store"
    dist.init_process_group(backend, init_method=store, **options)
    exchange = tg.Exchange(rank, world_size, device=device)
    # The prefetch thread's, as in a run.
    prefetch = tg.Exchange(rank, world_size, dist.new_group(backend="gloo", timeout=timeout))
    with open(shard.with_name(f"rank{rank}.jsonl"), "w", buffering=1) as file:
        for name, result, wanted in exchange_calls(exchange, device):
            file.write(json.dumps([name, torch.equal(result, wanted)]) + "\n")
        fp32 = tg.override(cfg, "params.*.reduction=fp32")
        sharded = tg.override(fp32, "ngrams.orders=2,3")
        whole = (replace(p, exchange="reduce_scatter") if p.is_table else p for p in fp32.params)
        pairs = {
            "n-grams on the host as sharded": (sharded, tg.override(sharded, "ngrams.placement=host")),
            "sparse as dense": (fp32, replace(fp32, params=tuple(whole))),
        }
        if world_size == 1:
            del pairs["sparse as dense"]
        for name, configs in pairs.items():
            runs = [train_small(config, exchange, prefetch, device, shard) for config in configs]
            same = all(torch.equal(a, b) and bool(a.isfinite().all()) for a, b in zip(*runs))
            trained = bool(runs[0][-1].any())  # rows of n-grams start at 0
            file.write(json.dumps([f"{cfg.steps} steps, {name}", same and trained]) + "\n")
    dist.destroy_process_group()
