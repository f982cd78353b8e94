#!/usr/bin/env python3
"""How far a textbook GPT gets: GPT-2's architecture and AdamW on the shards that train_gpt.py trains on.

    python bench/plain_gpt.py [--steps N] [--lr X] [--batch-tokens N] [--val-every N] [--log FILE] ...

One process on all cores, fp32, plain torch. The model is GPT-2's in small: learned positions, LayerNorm
before attention and before a GELU MLP of four times the width, biases, a head tied to the token embedding,
GPT-2's initialization. Training is what textbooks advise: AdamW (betas 0.9 and 0.95, weight decay 0.1 on
matrices), gradients clipped at norm 1, linear warm-up, then a cosine down to a tenth of the peak rate. A
batch is of windows that begin anywhere in the training tokens, and run across the starts of documents.

Validation is on the first --val-tokens targets, each predicted once. Windows overlap by half, and only the
second half of a window counts, so that every target but the first window's has at least half a context
before it. The clock starts after one batch's forward and backward pass, whose gradients are dropped, and
stops while validating.

The defaults are the best of eleven single runs on two cores, of about as many steps as took the cpu preset's
time before it had n-grams. Their losses are on the first 131,072 targets, which are harder than all together;
seed 0:

    layers x width   context   batch   rate   loss        layers x width   context   batch   rate   loss
    2 x 256          256       2048    4e-3   1.684       2 x 256          64        1024    4e-3   1.541
    2 x 256          256       2048    2e-3   1.630       2 x 256          64         512    2e-3   1.522
    2 x 256          256       1024    2e-3   1.608       2 x 256          32        1024    2e-3   1.474
    2 x 256          256       1024    1e-3   1.622       4 x 176          64        1024    2e-3   1.455
    2 x 256          128       1024    2e-3   1.471       6 x 148          64        1024    2e-3   1.549
    2 x 256          64        1024    2e-3   1.479

The defaults on all 524,288 targets: 1.334 after 205 and 240 s, in two runs between runs of the cpu preset,
which took 53 and 54 s to 1.062 (bench/curves/ has the second of each).
"""

import argparse
import json
import math
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

SOURCE = Path(__file__).read_bytes()  # before the imports, which take seconds: somebody may edit it meanwhile

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "data")]
import train_gpt as tg
from tokenize_text import UserError, make_parser, number, run_script

WARMUP = 0.05  # of the steps
FINAL_RATE = 0.1  # of the peak rate


class Block(nn.Module):
    """Adds attention, then an MLP, to the stream (batch, context, width)."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm_1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.norm_2 = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width)
        self.mlp_out = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, context, width = x.shape
        qkv = self.qkv(self.norm_1(x)).view(batch, context, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attention_out(y.transpose(1, 2).reshape(batch, context, width))
        return x + self.mlp_out(F.gelu(self.mlp_in(self.norm_2(x)), approximate="tanh"))


class PlainGPT(nn.Module):
    """Predicts every next token of windows of up to `context` tokens."""

    def __init__(self, vocabulary: int, context: int, layers: int, width: int, heads: int):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        for name, p in self.named_parameters():
            if p.ndim == 2:
                onto_stream = name.endswith(("attention_out.weight", "mlp_out.weight"))
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * layers) if onto_stream else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(p)

    def forward(self, inputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
        """Returns the cross-entropy of `targets`, nats; both (batch, context) int64."""
        x = self.tokens(inputs) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction=reduction)


class Log:
    """Writes lines to the screen, and to a new file in the form that records/compare.py reads."""

    def __init__(self, path: Path | None):
        self.file = open(path, "x", buffering=1, encoding="utf-8") if path else None

    def write(self, line: str, screen: bool = True) -> None:
        if self.file:
            self.file.write(line + "\n")
        if screen:
            tqdm.write(line)


def rate(step: int, steps: int, peak: float) -> float:
    """Returns the learning rate of a step, counted from 0."""
    warmup = max(1, round(WARMUP * steps))
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / (steps - warmup)
    return peak * (FINAL_RATE + (1 - FINAL_RATE) * 0.5 * (1 + math.cos(math.pi * progress)))


def adamw(model: PlainGPT) -> torch.optim.AdamW:
    """Makes the optimizer: weight decay on matrices, none on biases and norms."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)


def random_windows(tokens: Tensor, count: int, context: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draws windows of the training tokens: inputs and targets, each (count, context)."""
    starts = torch.randint(len(tokens) - context, (count, 1), generator=rng)
    windows = tokens[starts + torch.arange(context + 1)]
    return windows[:, :-1], windows[:, 1:]


@torch.inference_mode()
def validate(model: PlainGPT, tokens: Tensor, context: int) -> float:
    """Returns the mean loss of all tokens but the first, which fill windows that overlap by half."""
    half = context // 2
    inputs = tokens[:-1].unfold(0, context, half).split(32)
    targets = tokens[1:].unfold(0, context, half).split(32)
    total = 0.0
    for i, (x, y) in enumerate(zip(inputs, targets)):
        losses = model(x, y, reduction="none").view(x.shape).double()
        total += losses[:, half:].sum().item()
        if i == 0:
            total += losses[0, :half].sum().item()
    return total / (len(tokens) - 1)


def read_split(paths: list[Path], cfg: tg.Config) -> Tensor:
    """Returns the tokens of shards, int64."""
    tokens = np.concatenate([tg.read_shard(path, cfg).tokens for path in paths])
    return torch.from_numpy(tokens.astype(np.int64))


def check(args: argparse.Namespace, train_count: int, val_count: int) -> None:
    """Raises UserError if the options contradict each other or the data."""
    if args.width % args.heads or args.batch_tokens % args.context or args.context % 2:
        raise UserError("--width must be a multiple of --heads, --batch-tokens of --context, --context even")
    if args.val_tokens % (args.context // 2) or not args.context <= args.val_tokens < val_count:
        raise UserError(f"--val-tokens: give a multiple of half of --context, from it up to {val_count - 1}")
    if args.context >= train_count:
        raise UserError(f"--context must be less than the {train_count} training tokens")


def train(args: argparse.Namespace) -> None:
    """Builds the model, trains it against the clock, and write the log."""
    torch.set_num_threads(os.cpu_count())
    torch.set_flush_denormal(True)  # or steps become slower and slower: by half, after some hundred
    header = tg.read_header(tg.find_shards(str(args.data), "train")[0])
    cfg = replace(tg.CPU, data=str(args.data), vocab_size=header.vocab_size, bos_id=header.bos_id)
    data = tg.open_dataset(replace(cfg, val_slice_tokens=1, samples=0))
    train_tokens = read_split(data.train, cfg)
    val_tokens = read_split(data.val, cfg)
    check(args, len(train_tokens), len(val_tokens))
    val_tokens = val_tokens[: args.val_tokens + 1]
    torch.manual_seed(args.seed)
    rng = torch.Generator().manual_seed(args.seed)
    model = PlainGPT(cfg.vocab_size, args.context, args.layers, args.width, args.heads)
    optimizer = adamw(model)
    parameters = sum(p.numel() for p in model.parameters())

    log = Log(args.log)
    log.write(SOURCE.decode() + "=" * 100, screen=False)
    environment = tg.describe_environment(torch.device("cpu"), 1, __file__, SOURCE)
    for line in [*environment, f"data: {data.fingerprint}", f"parameters: {parameters:,}"]:
        log.write(line)
    config = {**vars(args), "data": args.data.name, "log": None, "parameters": parameters}
    # As train_gpt.py says it, so that compare.py knows which runs are alike. A plain GPT makes no record.
    slice_tokens = math.gcd(args.val_tokens, cfg.val_slice_tokens)
    config |= {"val_slice_tokens": slice_tokens, "val_slices": args.val_tokens // slice_tokens}
    config |= {"track": "other", "vocab_size": cfg.vocab_size}
    log.write("config: " + json.dumps(config) + "\n" + "=" * 100, screen=False)

    def backward() -> None:
        count = args.batch_tokens // args.context
        model(*random_windows(train_tokens, count, args.context, rng)).backward()

    backward()
    optimizer.zero_grad()
    clock = 0.0
    print("the default settings take four minutes on two cores")
    for step in tqdm(range(1, args.steps + 1), "steps", unit="step"):
        began = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = rate(step - 1, args.steps, args.lr)
        backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        clock += 1000 * (time.perf_counter() - began)
        times = f"train_time:{clock:.0f}ms step_avg:{clock / step:.2f}ms"
        log.write(f"step:{step}/{args.steps} {times}", screen=False)
        if step == args.steps or (args.val_every and step % args.val_every == 0):
            val_loss = validate(model, val_tokens, args.context)
            log.write(f"step:{step}/{args.steps} val_loss:{val_loss:.4f} {times}")
            if not math.isfinite(val_loss):
                raise UserError(f"the validation loss is {val_loss}: lower --lr")
    log.write(f"val_loss: {val_loss:.6f}\ntrain_time_ms: {clock:.0f}\nsteps: {args.steps}")
    log.write(f"tokens: {args.steps * args.batch_tokens}\nseed: {args.seed}\ncomplete: yes")


def main(argv: list[str] | None = None) -> None:
    parser = make_parser("plain_gpt.py", __doc__)

    def add(option: str, default: float, what: str, least: float = 1) -> None:
        kind, help_text = number(type(default), least), f"{what} (default: %(default)s)"
        parser.add_argument(option, type=kind, default=default, metavar="N", help=help_text)

    add("--steps", 2600, "updates")
    add("--batch-tokens", 1024, "tokens of an update")
    add("--lr", 2e-3, "peak learning rate", 0)
    add("--layers", 4, "blocks")
    add("--width", 176, "of the stream")
    add("--heads", 4, "of a block's attention")
    add("--context", 64, "tokens of a window")
    add("--seed", 0, "of the initialization and of the windows", 0)
    add("--val-every", 0, "validate after so many steps, too; 0: at the end only", 0)
    add("--val-tokens", 524288, "validate on the first N targets")
    data = REPOSITORY / "data" / "local"
    parser.add_argument("--data", type=Path, default=data, help="folder of the shards (default: data/local)")
    parser.add_argument("--log", type=Path, metavar="FILE", help="a new file, for records/compare.py")
    run_script(train, parser, argv, tg.UserError)


if __name__ == "__main__":
    main()
