#!/usr/bin/env python3
"""Takes HellaSwag with a model that `./run.sh --save MODEL` has written: which of four endings fits a text?

    python evals/hellaswag.py MODEL --file hellaswag_val.jsonl [--limit N]
    python evals/hellaswag.py MODEL --dataset OWNER/NAME              (downloads that file, 12 MB)

Prints two accuracies on the validation split's 10,042 items (Zellers et al. 2019, arXiv:1905.07830), each
with its standard error (binomial). The model is trained on none of them. Chance is 0.25.

    acc_norm   the right ending has the lowest mean loss per token
    acc        the right ending has the lowest sum of losses

As in llm.c, a text is `ctx` as it is, a space and an ending, whose tokens alone count; by this GPT-2 (124M)
has 0.2955 and 0.2859. Of n endings that share the lowest loss each counts 1 / n. lm-evaluation-harness cleans
the texts and divides by the ending's characters.

Items come in a fixed pseudorandom order, and --limit takes the first N. So the accuracy so far, beside the
progress bar, is that of a random sample. On a GPU if there is one, in plain torch either way.

A line of a FILE is JSON: `ctx`, four `endings`, a `label` from 0 to 3. Blank lines are skipped. --dataset
names a dataset of the hub that has hellaswag_val.jsonl. None is built in: copies come and go, and their
licence is yours to judge. What arrives must have the SHA-256 of the original, and stays in data/hellaswag.
"""

import argparse
import hashlib
import itertools
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from tqdm import tqdm

from generate import ROOT, load, make_parser, number, run_script, tg, tokenize_text
from saved_model import token_losses

NAME = "hellaswag_val.jsonl"
FOLDER = ROOT / "data/hellaswag"
SHA256 = "0aa3b88843990f3f10a97b9575c94d7b71fb2205240ba04ae4884d9e9c992588"  # of the original
ITEMS = 10042
CPU_BATCH_TOKENS = 4096


class Item(NamedTuple):
    context: str
    endings: list[str]
    label: int


class Document(NamedTuple):
    tokens: np.ndarray  # (n,) uint16: BOS, the context, an ending
    scored: int  # how many of the last are the ending's


def check(path: Path) -> None:
    """Raises tokenize_text.UserError unless the file is the original."""
    if hashlib.sha256(path.read_bytes()).hexdigest() != SHA256:
        raise tokenize_text.UserError(f"{path}: not the original, whose SHA-256 begins with {SHA256[:12]}")


def download(dataset: str) -> Path:
    """Returns the original file, downloaded unless it is there. A stopped download continues."""
    import fineweb  # here: a FILE needs no hub

    fineweb.logging.set_verbosity_error()  # of its retries; the last error is reported
    try:
        FOLDER.mkdir(parents=True, exist_ok=True)
        fineweb.fetch(FOLDER, NAME, dataset, check)
    except fineweb.ERRORS as error:
        reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
        raise tg.UserError(f"cannot get {NAME} from {dataset}: {reason}; try again, or use --file") from error
    return FOLDER / NAME


def read_items(path: Path, limit: int | None = None) -> list[Item]:
    """Returns `limit` items, or all, in the fixed order. Raises tg.UserError if any in the file is bad."""
    items, needs = [], "it needs a text `ctx`, four texts `endings`, a `label` from 0 to 3"
    for line, text in enumerate(path.read_bytes().splitlines(), 1):
        if not text.strip():
            continue
        with tg.user_error_on(
            f"{path}:{line}: not an item", needs, ValueError, LookupError, TypeError, RecursionError
        ):
            entry = json.loads(text)
            label = [*"0123"].index(str(entry["label"]))  # Rowan/hellaswag's are texts
            item = Item(entry["ctx"], entry["endings"], label)
            kinds = [type(part) for part in (item.context, item.endings, *item.endings)]
            if kinds != [str, list, str, str, str, str]:
                raise ValueError("other types or numbers")
        items.append(item)
    if len(items) < limit if limit else len(items) != ITEMS:
        raise tg.UserError(
            f"{path} has {len(items)} items, not {limit or ITEMS}; complete it, or lower --limit"
        )
    order = np.random.RandomState(0).permutation(len(items))  # a generator that NumPy never changes
    return [items[i] for i in order[:limit]]


def encode(item: Item, encoding: "tokenize_text.Encoding") -> list[Document]:
    context = [encoding.eot_token] + encoding.encode_ordinary(item.context)
    documents = []
    for text in item.endings:
        ending = encoding.encode_ordinary(" " + text)
        documents.append(Document(np.array(context + ending, np.uint16), len(ending)))
    return documents


def pack(documents: Sequence[Document], cfg: tg.Config) -> tg.MicroBatch:
    """Returns a micro-batch in which each document has the losses that it has alone.

    N-grams, the smear and shifted keys look back over a document's start. So n-grams are hashed document by
    document, and each has two BOS before it, documents of one token. The smear takes from the token before:
    the first BOS has something of other text, the second is a multiple of itself, which its norm undoes. So
    the second has the key of the document's own BOS, to which that is shifted.
    """
    alone = []
    ends = [0]
    for tokens, _ in documents:
        n = len(tokens)
        alone.append(tg.make_micro_batch(np.append(tokens, 0), tg.EMPTY_INT32, n, cfg))
        ends += [ends[-1] + 1, ends[-1] + 2, ends[-1] + 2 + n]

    def join(name: str) -> torch.Tensor:
        parts = []
        for batch in alone:
            t = getattr(batch, name)
            bos = t[..., :1]
            parts += [bos, bos, t]
        return torch.cat(parts, -1)

    sign_ids = join("sign_ids") if cfg.sign_rows else None
    longest = max(len(d.tokens) for d in documents)
    packed = tg.MicroBatch(
        join("inputs"), join("targets"), join("hashed_rows"), sign_ids, tg.int32(np.array(ends)), longest
    )
    return tg.pack(packed)


def ending_losses(model: tg.GPT, documents: Sequence[Document]) -> list[np.ndarray]:
    """Returns the losses of each document's ending, (scored,) float64, by one forward."""
    losses = token_losses(model, pack(documents, model.cfg))
    found = []
    end = 0
    for tokens, scored in documents:
        end += 2 + len(tokens)
        last = end - 1  # whose target is no longer the document's
        found.append(losses[last - scored : last])
    return found


def batches(documents: Sequence[Document], budget: int) -> Iterator[Sequence[Document]]:
    """Yields `documents` in batches of at most `budget` tokens, with the two before each document."""
    sizes = [2 + len(d.tokens) for d in documents]
    if max(sizes) > budget:
        raise tg.UserError(f"a text has {max(sizes) - 2} tokens; this model takes {budget - 2}")
    ends = np.cumsum([0] + sizes)
    begin = 0
    while begin < len(documents):
        end = int(np.searchsorted(ends, ends[begin] + budget, "right")) - 1
        yield documents[begin:end]
        begin = end


def score(losses: Sequence[np.ndarray], label: int) -> np.ndarray:
    """Returns whether the least mean, and the least sum, of four endings' losses is the right one's, (2,).

    Of n endings that have the least, up to rounding, each counts 1 / n, as if one of them were drawn.
    """
    means_and_sums = np.array([(x.mean(), x.sum()) for x in losses])
    # Where a text is in its batch changes the last bits.
    least = np.isclose(means_and_sums, means_and_sums.min(0))
    return least[label] / least.sum(0)


def run(args: argparse.Namespace) -> None:
    model, encoding = load(args.model)
    path = args.file or download(args.dataset)
    items = read_items(path, args.limit)
    documents = []
    for item in items:
        documents += encode(item, encoding)
    budget = model.cfg.val_slice_tokens
    if model.device.type == "cpu":
        budget = min(budget, CPU_BATCH_TOKENS)
    losses = itertools.chain.from_iterable(
        ending_losses(model, batch) for batch in batches(documents, budget)
    )
    right = np.zeros(2)
    with tqdm(items, unit="item", miniters=1, disable=None) as bar:
        for done, item in enumerate(bar, 1):
            right += score(list(itertools.islice(losses, 4)), item.label)
            bar.set_postfix(acc_norm=f"{right[0] / done:.4f}", refresh=False)
    for name, share in zip(("acc_norm", "acc"), right / len(items)):
        print(f"{name:8} {share:.4f} +- {math.sqrt(share * (1 - share) / len(items)):.4f}")
    print(f"chance   0.2500; {len(items):,} items of {path}")


def main(argv: list[str] | None = None) -> None:
    parser = make_parser("hellaswag.py", __doc__)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--file", type=Path, metavar="FILE", help="the items")
    source.add_argument("--dataset", metavar="OWNER/NAME", help="of the hub: download them from there")
    parser.add_argument("--limit", type=number(int, 1), metavar="N", help="take N items (default: all)")
    run_script(run, parser, argv, tg.UserError)


if __name__ == "__main__":
    main()
