#!/usr/bin/env python3
"""Evaluates interpolated Witten-Bell n-gram models on the shards that train_gpt.py trains on.

    python bench/ngram.py [--data data/local] [--val-tokens N] [--orders N]
    python bench/ngram.py --model MODEL [--data FOLDER]

An n-gram model predicts a token w from h, the n-1 tokens before it, by counts in the training shards:

    p_n(w | h) = (c(h, w) + T(h) · p_{n-1}(w | h')) / (c(h) + T(h)),        p_0(w) = 1 / vocabulary

c counts; T(h) is the number of distinct tokens seen after h; h' is h without its oldest token; where h was
never seen, p_n = p_{n-1}. Nothing is tuned. (Witten and Bell, "The zero-frequency problem", IEEE Trans.
Inform. Theory 37, 1991, method C; in this interpolated form: Chen and Goodman, "An empirical study of
smoothing techniques for language modeling", Harvard TR-10-98, 1998, section 2.6.)

Prints the mean loss over the validation tokens after the first, and per byte of their text: what a network on
the same shards must beat to show that it learned more than counts. train_gpt.py's `cpu` preset validates on
the first 524,288 targets (--val-tokens 524289): there, on Python 3.11's library, the trigram has 1.847 nats
and the 4-gram 1.469.

--model measures instead what an index of training text would add to a model that --save wrote. (Pull request
367 of the public speedrun gives a model such an index, and trains with it; here it comes after training.)
For each order n of ORDERS, ascending, the probability of the next token w becomes

    P(w) <- (1 - l) P(w) + l c_n(w) / N_n

N_n counts where the last n tokens occur in the text, c_n(w) where w follows them. An order with N_n = 0
changes nothing. Contexts may begin with BOS, and never reach into the document before. Those of validation
may reach back over the start of a slice, which the model's do not. The weight l depends on n and floor(log2
N_n). Weights are fitted by likelihood on the last 2 % of the training shards (of the last, if there are
several), which neither the counts nor the run have read. That is other passages of files that were counted,
so it has more matches than validation text, which is other files. The text that the run trained on is cut as
in training, with BOS after every cut. The validation tokens are training's: alone, the model has its
val_loss.
"""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / folder) for folder in ("", "data", "evals")]
import train_gpt as tg
from saved_model import load_model
from tokenize_text import UserError, make_parser, number, run_script

ORDERS = 1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32


def packed_grams(tokens: np.ndarray, n: int, bits: int) -> np.ndarray:
    """Packs each run of n tokens into a number, `bits` a token, the newest lowest: (len - n + 1,) uint64."""
    count = len(tokens) - n + 1
    grams = np.zeros(count, np.uint64)
    for i in range(n):
        grams = (grams << np.uint64(bits)) | tokens[i : i + count].astype(np.uint64)
    return grams


def lookup(keys: np.ndarray, values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Returns values[i] where `wanted` equals keys[i] (sorted), 0 where it equals none."""
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[at] == wanted, values[at], 0)


def read_split(paths: list[Path], cfg: tg.Config) -> np.ndarray:
    return np.concatenate([tg.read_shard(path, cfg).tokens for path in paths])


def losses_by_order(train: np.ndarray, val: np.ndarray, vocab_size: int, orders: int) -> list[np.ndarray]:
    """Returns -log p_n in nats for n = 1..orders, of each token of `val` but the first: (len(val) - 1,).

    train, val: 1-D token ids below `vocab_size`. A token with fewer than n-1 before it gets the longest
    history there is. Raises UserError if n tokens do not fit into 64 bits, or if `train` has fewer than n.
    """
    bits = max(1, (vocab_size - 1).bit_length())
    if orders * bits > 64 or orders > len(train):
        raise UserError(f"--orders must be at most {min(64 // bits, len(train))} with this data")
    p = np.full(len(val), 1 / vocab_size)
    losses = []
    for n in range(1, min(orders, len(val)) + 1):
        grams, gram_count = np.unique(packed_grams(train, n, bits), return_counts=True)
        # Sorted grams of one history are neighbours: their counts sum to c(h), their number is T(h).
        histories, first, distinct = np.unique(
            grams >> np.uint64(bits), return_index=True, return_counts=True
        )
        history_count = np.add.reduceat(gram_count, first)
        wanted = packed_grams(val, n, bits)
        c_hw = lookup(grams, gram_count, wanted)
        wanted_histories = wanted >> np.uint64(bits)
        c_h = lookup(histories, history_count, wanted_histories)
        t_h = lookup(histories, distinct, wanted_histories)
        lower = p[n - 1 :]
        p[n - 1 :] = np.where(c_h > 0, (c_hw + t_h * lower) / np.maximum(c_h + t_h, 1), lower)
        losses.append(-np.log(p[1:]))
    return losses


def context_keys(tokens: np.ndarray, vocab_size: int) -> Iterator[tuple]:
    """Yields for each order n a key of each token but the first, and whether it has a context of n tokens.

    A key's low bits are the token. The others are a hash of the n tokens before it: the exclusive or of
    random numbers, one for each token at each distance. Another context shares it with probability 2^-55 for
    bytes: of 0.75M contexts looked up among 11M, 0.0003 find a wrong one. The next order changes the keys.
    """
    bits = vocab_size.bit_length()
    numbers = np.random.default_rng(0).integers(1 << (64 - bits), size=(ORDERS[-1], vocab_size)) << bits
    at = np.arange(len(tokens))
    keys = tokens[1:].astype(np.uint64)
    before = at - np.maximum.accumulate(np.where(tokens == vocab_size - 1, at, 0))  # in the document
    for n in range(1, ORDERS[-1] + 1):
        keys[n - 1 :] ^= numbers.view(np.uint64)[n - 1, tokens[:-n]]
        if n in ORDERS:
            yield keys, before[:-1] >= n - 1


def count_followers(train: np.ndarray, text: np.ndarray, vocab_size: int) -> np.ndarray:
    """Returns N_n and c_n(w) in `train` for each token w of `text` but the first: (orders, 2, len - 1)."""
    counts = np.zeros((len(ORDERS), 2, len(text) - 1), int)
    low = np.uint64((1 << vocab_size.bit_length()) - 1)  # no token
    orders = tqdm(counts, "orders", disable=None, leave=False)
    keys_of_train = context_keys(train, vocab_size)
    keys_of_text = context_keys(text, vocab_size)
    for found, (keys, counted), (wanted, known) in zip(orders, keys_of_train, keys_of_text):
        wanted, places = np.unique(wanted[known], return_inverse=True)  # sorted ones are found sooner
        sought = wanted & ~low, wanted | low, wanted, wanted + 1
        a, b, c, d = np.searchsorted(np.sort(keys[counted]), sought)
        found[:, known] = np.stack([b - a, d - c])[:, places]
    return counts


def mix(p: np.ndarray, counts: np.ndarray, weights: np.ndarray) -> list:
    """Returns the probabilities p (n,) of tokens, and those after each order.

    weights: (orders, 33), each by the number of bits of N_n; those of 0 must be 0.
    """
    steps = [p]
    for (total, hits), weight in zip(counts, weights):
        own = weight[np.frexp(total)[1]]
        steps.append((1 - own) * steps[-1] + own * hits / np.maximum(total, 1))
    return steps


def fit_weights(p: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Returns the weights for mix() under which these tokens are likely, by expectation maximization.

    Each weight is fitted as if one more token had come to it, and had not used the counts. So it is below 1.
    """
    weights = np.full((len(counts), 33), 0.5)
    weights[:, 0] = 0
    bins = np.frexp(counts[:, 0])[1]
    for _ in range(30):
        steps = mix(p, counts, weights)
        reached = np.ones(len(p))
        # The probability that no higher order drew the token: `reached`; nor this one: `passed`.
        for k in reversed(range(len(counts))):
            passed = reached * (1 - weights[k][bins[k]]) * steps[k] / steps[k + 1]
            drawn = np.bincount(bins[k], reached - passed, 33)
            weights[k] = drawn / (np.bincount(bins[k], reached, 33) + 1)
            reached = passed
    return weights


def trained_text(cfg: tg.Config, paths: list[Path]) -> tuple:
    """Returns the tokens that a run trains on, in order, and the loader's position after them."""
    loader = tg.TrainLoader(cfg, paths, 0, 1)
    parts = []
    for step in range(cfg.steps):
        plan = tg.plan_step(cfg, step)
        parts += [part.inputs.numpy() for part in loader.micro_batches(plan)]
    loader.close()
    return np.concatenate(parts), loader.position()


def evaluate_with_counts(path: str, folder: Path | None) -> None:
    """Prints the losses of a saved model, of counts, and of both. folder: other data than the model's."""
    print("this takes about a minute on two cores", flush=True)
    tg.torch.set_num_threads(1)  # a small model's threads wait more than they work
    model = load_model(path)
    cfg = model.cfg
    folder = folder or ROOT / cfg.data
    data = tg.open_dataset(replace(cfg, data=str(folder)))
    last = tg.read_shard(data.train[-1], cfg)
    first = np.searchsorted(last.bounds, 0.98 * len(last.tokens))
    trained, position = trained_text(cfg, data.train)
    fitted = last.tokens[last.bounds[first] :]
    if len(fitted) < cfg.val_slice_tokens or position[:2] > (len(data.train) - 1, first):
        raise UserError("too few tokens are left to fit weights on, or the run has read them; add text")
    train = read_split(data.train, cfg)[: -len(fitted)]

    loader = tg.ValLoader(cfg, data.val)
    val_tokens = len(loader.tokens) - 1
    text = np.concatenate([loader.tokens, fitted])
    loader.tokens = text
    losses = []
    for i in tqdm(range((len(text) - 1) // cfg.val_slice_tokens), "model", disable=None, leave=False):
        losses.append(model.token_losses(loader.slice(i), tg.window_tokens(cfg, cfg.val_windows)).double())
    p = np.exp(-np.concatenate(losses))

    def report(p: np.ndarray, name: str) -> None:
        val_loss = -np.log(p[:val_tokens]).mean()
        fit_loss = -np.log(p[val_tokens:]).mean()
        print(f"{val_loss:.4f}  {fit_loss:.4f}  {name}", flush=True)

    read = "that it was trained on"
    if model.data_fingerprint not in ("", data.fingerprint):
        print(f"the data in {folder} are not those that the model was trained on")
        read = "that as many steps read here"
    print(f"nats per token: of {val_tokens:,} for validation, of {len(p) - val_tokens:,} to fit weights on")
    report(p, "model alone")
    for tokens, name in ((trained, read), (train, "of all")):
        counts = count_followers(tokens, text[: len(p) + 1], cfg.vocab_size)
        for base, what in ((np.full(len(p), 1 / cfg.vocab_size), "counts alone"), (p, "model and counts")):
            weights = fit_weights(base[val_tokens:], counts[..., val_tokens:])
            report(mix(base, counts, weights)[-1], f"{what}, {len(tokens):,} tokens {name}")
        share = np.mean(counts[-1, 0, :val_tokens] > 0)
        print(f"the {ORDERS[-1]} tokens before {share:.2%} of validation tokens occur in this text")


def run(args: argparse.Namespace) -> None:
    if args.model:
        if args.val_tokens or args.orders:
            raise UserError("--model measures by a method of its own: leave out --val-tokens and --orders")
        return evaluate_with_counts(args.model, args.data)
    folder = args.data or ROOT / "data/local"
    val_paths = tg.find_shards(str(folder), "val")
    headers = [tg.read_header(path) for path in val_paths]
    vocab_size = headers[0].vocab_size
    cfg = replace(tg.CPU, vocab_size=vocab_size, bos_id=headers[0].bos_id)
    train_paths = tg.find_shards(str(folder), "train")
    for path in val_paths + train_paths:
        header = tg.read_header(path)
        if (header.vocab_size, header.bos_id) != (cfg.vocab_size, cfg.bos_id):
            raise UserError(
                f"{path}: its vocabulary is not that of {val_paths[0]}; give data of one tokenizer"
            )
    train = read_split(train_paths, cfg)
    val = read_split(val_paths, cfg)
    orders = args.orders or (5 if vocab_size < 4096 else 4)
    if not 2 <= (args.val_tokens or len(val)) <= len(val):
        raise UserError(f"--val-tokens must lie in 2..{len(val)}")
    losses = losses_by_order(train, val[: args.val_tokens], vocab_size, orders)
    # Tokens per byte of the whole split, even if only its beginning is evaluated, like train_gpt.py.
    shard_bytes = [header.text_bytes for header in headers]
    print(f"{len(train):,} training tokens, {len(losses[0]):,} validation tokens; nats")
    for n, loss in enumerate(losses, 1):
        line = f"{n}-gram  per token {loss.mean():.4f}"
        if all(shard_bytes):
            line += f"  per byte {loss.mean() * len(val) / sum(shard_bytes):.4f}"
        print(line)


def main(argv: list[str] | None = None) -> None:
    parser = make_parser("ngram.py", __doc__)
    add = parser.add_argument
    count = number(int, 1)
    add("--model", help="file that --save wrote: measure what counts add to it; no other option but --data")
    add("--data", type=Path, help="folder of the shards (default: the model's, or data/local)")
    add("--val-tokens", type=count, metavar="N", help="only the first N validation tokens (default: all)")
    add("--orders", type=count, metavar="N", help="up to N-grams (default: 5, or 4 with GPT-2's tokens)")
    run_script(run, parser, argv, tg.UserError)


if __name__ == "__main__":
    main()
