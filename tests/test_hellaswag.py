"""Tests evals/hellaswag.py: its losses against the texts' alone, its accuracies, and its download."""

import hashlib
import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import tiktoken
import torch

import fineweb
import hellaswag
import train_gpt as tg
from golden_inputs import generator
from hellaswag import Item
from test_evals import random_model, save
from tokenize_text import get_encoding


def some_items(count):
    rng = np.random.default_rng(0)

    def words(least, most):
        return "".join(rng.choice(list("abcdefg "), rng.integers(least, most)))

    return [Item(words(0, 40), [words(1, 9) for _ in range(4)], 0) for _ in range(count)]


def losses_alone(model, document):
    """Returns an ending's losses, each by a forward of the text before its token and nothing else."""
    windows = tg.window_tokens(model.cfg, model.cfg.val_windows)
    n = len(document.tokens)
    losses = []
    for end in range(n - document.scored + 1, n + 1):
        batch = tg.make_micro_batch(document.tokens[:end], tg.EMPTY_INT32, end, model.cfg)
        losses.append(model.token_losses(batch, windows)[-1].item())
    return np.array(losses)


# ---- Losses ------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("orders", ("", "2,3,5"))
def test_packed_losses_are_those_of_each_text_alone(tmp_path, orders):
    """Whatever it is packed with: bigrams or n-grams, the smear and shifted keys look at the token before."""
    path = str(tmp_path / "model.pt")
    model = random_model(tmp_path, "val_slice_tokens=256", "dtype=float64", f"ngrams.orders={orders}")
    model.ngrams = tg.Optimizer(model.cfg, dict(model.named_parameters()), tg.Collectives(0, 1)).ngrams
    if orders:
        model.ngrams.block.normal_(generator=generator(1))
    save(path, model)
    model, encoding = hellaswag.load(path)
    documents = hellaswag.encode(Item("abc " * 50, ["a"] * 4, 0), encoding)[3:]
    for item in some_items(5):
        documents += hellaswag.encode(item, encoding)
    first, second = list(hellaswag.batches(documents, 256))[:2]
    assert len(first) > 1 < len(second)
    for batch in (first, second, first[::-1]):
        for losses, document in zip(hellaswag.ending_losses(model, batch), batch, strict=True):
            np.testing.assert_allclose(losses, losses_alone(model, document), atol=1e-8, rtol=0)


def test_scored_tokens_are_the_endings():
    """Also where a token could span the context's end."""
    ranks = {bytes([i]): i for i in range(256)} | {b"a ": 256, b" b": 257}
    special = {"<|endoftext|>": 258}
    encoding = tiktoken.Encoding("m", pat_str=r"[^.]+", mergeable_ranks=ranks, special_tokens=special)
    document = hellaswag.encode(Item("a", ["bc"], 0), encoding)[0]
    assert (document.tokens.tolist(), document.scored) == ([258, ord("a"), 257, ord("c")], 2)


# ---- Accuracy ----------------------------------------------------------------------------------------------


def test_printed_accuracies(monkeypatch, capsys):
    """Of batches of three endings; the losses are the tokens. Spaces have the least mean, a the least sum."""
    items = [Item("x" * 70, ["a", "    ", "zz", "zzz"], label) for label in (1, 1, 0, 2)]
    model = SimpleNamespace(cfg=replace(tg.CPU, val_slice_tokens=256), device=torch.device("cpu"))

    def ending_losses(model, documents):
        return [document.tokens[-document.scored :] for document in documents]

    monkeypatch.setattr(hellaswag, "load", lambda path: (model, get_encoding("bytes")))
    monkeypatch.setattr(hellaswag, "read_items", lambda path, limit: items)
    monkeypatch.setattr(hellaswag, "ending_losses", ending_losses)
    hellaswag.main(["model.pt", "--file", "items.jsonl"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["acc_norm 0.5000 +- 0.2500", "acc      0.2500 +- 0.2165"]


def test_endings_of_equal_losses_share_the_item():
    """Else the first of them would be right wherever the label is 0: the mean and the sum, each by itself."""
    losses = [np.array(each) for each in ([1.0, 1.0], [1.000001], [3.0], [0.5, 1.5])]
    found = [hellaswag.score(losses, label).tolist() for label in range(4)]
    assert found == [[1 / 3, 0], [1 / 3, 1], [0, 0], [1 / 3, 0]]


# ---- Items -------------------------------------------------------------------------------------------------


GOOD = b'{"ctx": "a", "endings": ["b", "c", "d", "e"], "label": 0}'


def test_a_limit_takes_the_beginning_of_one_shuffled_order(tmp_path, monkeypatch):
    """The dataset on the hub has labels as text. Blank lines are no items."""
    lines = [GOOD.replace(b"a", b"%d" % i, 1) for i in range(50)]
    lines[9] = lines[9].replace(b"0", b'"0"')
    path = tmp_path / "items.jsonl"
    path.write_bytes(b"\n \n\n".join(lines))
    monkeypatch.setattr(hellaswag, "ITEMS", 50)
    found = hellaswag.read_items(path)
    items = [Item(str(i), ["b", "c", "d", "e"], 0) for i in range(50)]
    assert found != items and sorted(found) == sorted(items)
    assert hellaswag.read_items(path, 1) == found[:1]


DAMAGE = [
    GOOD[:-9],  # cut
    b"[1, 2]",
    GOOD.replace(b"ctx", b"text"),
    GOOD.replace(b', "e"', b""),
    GOOD.replace(b'"e"', b"5"),
    re.sub(rb"\[.*]", b'"bcde"', GOOD),
    GOOD.replace(b"a", b"\xff"),
]
for label in (b"4", b'""', b"1.0", b"true", b'"12"'):
    DAMAGE.append(GOOD.replace(b"0", label))


def test_damaged_and_missing_items_are_named(tmp_path):
    path = tmp_path / "items.jsonl"
    for line in DAMAGE:
        path.write_bytes(b"\n".join([GOOD, line]))
        with pytest.raises(tg.UserError, match=f"^{path}:2: not an item"):
            hellaswag.read_items(path, 1)
    path.write_bytes(GOOD)
    for limit, wanted in (None, 10042), (4, 4):
        with pytest.raises(tg.UserError, match=f"has 1 items, not {wanted};"):
            hellaswag.read_items(path, limit)


# ---- Download ----------------------------------------------------------------------------------------------


def test_download(tmp_path, monkeypatch):
    """What arrives is checked, and a failure is one line. (test_fineweb.py tests the download itself.)"""

    def fetch(folder, name, dataset, check):
        (folder / name).write_text(dataset)
        check(folder / name)

    monkeypatch.setattr(fineweb, "fetch", fetch)
    monkeypatch.setattr(hellaswag, "FOLDER", tmp_path / "data")
    monkeypatch.setattr(hellaswag, "SHA256", hashlib.sha256(b"original").hexdigest())
    assert hellaswag.download("original") == tmp_path / "data/hellaswag_val.jsonl"
    with pytest.raises(tg.UserError, match=r"^cannot get hellaswag_val.jsonl from another: .*--file$"):
        hellaswag.download("another")
