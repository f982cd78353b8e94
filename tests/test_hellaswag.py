"""Tests evals/hellaswag.py: its losses against the texts' alone, its accuracies, and its download."""

import hashlib
import json
import math
import re

import numpy as np
import pytest
import tiktoken
import torch

import fineweb
import hellaswag
import train_gpt as tg
from hellaswag import Item
from test_evals import randomize, save
from test_ngram_runs import make_config


def some_items(count, seed=0):
    rng = np.random.default_rng(seed)

    def words(least, most):
        return "".join(rng.choice(list("abcdefg "), rng.integers(least, most)))

    return [Item(words(0, 40), [words(1, 9) for _ in range(4)], int(rng.integers(4))) for _ in range(count)]


def as_lines(items):
    lines = [{"ctx": item.context, "endings": item.endings, "label": item.label} for item in items]
    return "\n".join(map(json.dumps, lines))


@pytest.fixture(scope="module", params=["ngrams.orders=", "ngrams.orders=2,3,5"])
def saved(request, tmp_path_factory):
    """Returns the file of a saved model of bytes, with bigrams or n-grams, and strong weights everywhere."""
    folder = tmp_path_factory.mktemp("saved")
    model = tg.GPT(make_config(folder, "val_slice_tokens=256", "dtype=float64", request.param))
    randomize(model)
    model.ngrams = tg.Optimizer(model.cfg, dict(model.named_parameters()), tg.Exchange(0, 1)).ngrams
    if model.ngrams:
        model.ngrams.block.normal_(generator=torch.Generator().manual_seed(1))
    save(str(folder / "model.pt"), model)
    return str(folder / "model.pt")


def losses_alone(model, document):
    """Returns an ending's losses, each by a forward of the text before its token and nothing else."""
    windows = tg.window_tokens(model.cfg, model.cfg.val_windows)
    n = len(document.tokens)
    losses = []
    for end in range(n - document.scored + 1, n + 1):
        batch = tg.make_micro_batch(document.tokens[:end], tg.NO_INT32, end, model.cfg)
        losses.append(model.token_losses(batch, windows)[-1].item())
    return np.array(losses)


# ---- Losses ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_packed_losses_are_those_of_each_text_alone(saved):
    """Whatever it is packed with: bigrams or n-grams, the smear and shifted keys look at the token before."""
    model, encoding = hellaswag.load(saved)
    documents = hellaswag.encode(Item("abc " * 50, ["a"] * 4, 0), encoding)[3:]
    for item in some_items(5):
        documents += hellaswag.encode(item, encoding)
    first, second = list(hellaswag.batches(documents, 256))[:2]
    assert len(first) > 1 < len(second)
    for batch in (first, second, first[::-1]):
        for losses, document in zip(hellaswag.ending_losses(model, batch), batch, strict=True):
            np.testing.assert_allclose(losses, losses_alone(model, document), atol=1e-8, rtol=0)
    # In validation's micro-batches they would differ: these weights show it.
    lengths = [len(d.tokens) for d in second]
    tokens = np.concatenate([d.tokens for d in second] + [[0]])
    batch = tg.make_micro_batch(tokens, np.cumsum(lengths)[:-1], max(lengths), model.cfg)
    losses = model.token_losses(batch, tg.window_tokens(model.cfg, model.cfg.val_windows)).numpy()
    last = losses[len(losses) - 1 - second[-1].scored : -1]
    assert abs(last - losses_alone(model, second[-1])).max() > 1e-5


def test_scored_tokens_are_the_endings():
    """Also where a token could span the context's end."""
    ranks = {bytes([i]): i for i in range(256)} | {b"a ": 256, b" b": 257}
    special = {"<|endoftext|>": 260}
    encoding = tiktoken.Encoding("m", pat_str=r"[^.]+", mergeable_ranks=ranks, special_tokens=special)
    a, b, c = b"abc"
    first, second, *_ = hellaswag.encode(Item("ca", ["b", "c", "", ""], 0), encoding)
    assert (first.tokens.tolist(), first.scored) == ([260, c, a, 257], 1)
    assert (second.tokens.tolist(), second.scored) == ([260, c, a, ord(" "), c], 2)


# ---- Accuracy ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_printed_accuracies(saved, tmp_path, capsys):
    """Many batches, with items that begin in one and end in the next."""
    path = tmp_path / "items.jsonl"
    path.write_text(as_lines(some_items(30, 5)))
    hellaswag.main([saved, "--file", str(path), "--limit", "16"])
    lines = capsys.readouterr().out.splitlines()
    model, encoding = hellaswag.load(saved)
    right_by_mean, right_by_sum = [], []
    for item in hellaswag.read_items(path, 16):
        losses = [losses_alone(model, document) for document in hellaswag.encode(item, encoding)]
        right_by_mean.append(np.argmin([each.mean() for each in losses]) == item.label)
        right_by_sum.append(np.argmin([each.sum() for each in losses]) == item.label)
    assert right_by_mean != right_by_sum
    for line, name, right in (lines[0], "acc_norm", right_by_mean), (lines[1], "acc", right_by_sum):
        p = np.mean(right)
        assert line.split() == [name, f"{p:.4f}", "+-", f"{math.sqrt(p * (1 - p) / 16):.4f}"]


def test_endings_of_equal_losses_share_the_item():
    """Else the first of them would be right wherever the label is 0: the mean and the sum, each by itself."""
    losses = [np.array(each) for each in ([1.0, 1.0], [1.000001], [3.0], [0.5, 1.5])]
    found = [hellaswag.score(losses, label).tolist() for label in range(4)]
    assert found == [[1 / 3, 0], [1 / 3, 1], [0, 0], [1 / 3, 0]]
    different = [np.array([each]) for each in (2.001, 2.0, 2.001, 2.001)]
    assert hellaswag.score(different, 1).tolist() == [1, 1]


# ---- Items -------------------------------------------------------------------------------------------------


def test_a_limit_takes_the_beginning_of_one_shuffled_order(tmp_path, monkeypatch):
    items = some_items(50)
    path = tmp_path / "items.jsonl"
    path.write_text(as_lines(items))
    monkeypatch.setattr(hellaswag, "ITEMS", 50)
    found = hellaswag.read_items(path)
    assert found != items and sorted(found) == sorted(items)
    for limit in (1, 50):
        assert hellaswag.read_items(path, limit) == found[:limit]
    # The dataset on the hub has labels as text. Blank lines are no items.
    path.write_text(path.read_text().replace('"label": 2', '"label": "2"').replace("\n", "\n \n\n"))
    assert hellaswag.read_items(path) == found


GOOD = b'{"ctx": "a", "endings": ["b", "c", "d", "e"], "label": 0}'
DAMAGE = [
    GOOD[:-9],  # cut
    b"[1, 2]",
    GOOD.replace(b"ctx", b"text"),
    GOOD.replace(b', "e"', b""),
    GOOD.replace(b'"e"', b"5"),
    re.sub(rb"\[.*]", b'"bcde"', GOOD),
    GOOD.replace(b"a", b"\xff"),
]
for label in (b"4", b'""', b"1.9", b"1.0", b"true", b"null", b'"12"'):
    DAMAGE.append(GOOD.replace(b"0", label))


def test_damaged_and_missing_items_are_named(tmp_path):
    path = tmp_path / "items.jsonl"
    for line in DAMAGE:
        path.write_bytes(b"\n".join([GOOD, line, GOOD]))
        with pytest.raises(tg.UserError, match=f"^{path}:2: not an item"):
            hellaswag.read_items(path, 1)
    path.write_bytes(GOOD)
    for limit, wanted in (None, 10042), (4, 4):
        with pytest.raises(tg.UserError, match=f"^{path} has 1 items, not {wanted};"):
            hellaswag.read_items(path, limit)


# ---- Download ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", (None, "another file", "no server"))
def test_download(fault, tmp_path, monkeypatch):
    """What arrives is checked, and a failure is one line. (test_fineweb.py tests the download itself.)"""

    def fetch(folder, name, dataset, check):
        assert (name, dataset) == ("hellaswag_val.jsonl", "someone/texts")
        if fault == "no server":
            raise ConnectionError("refused\nat once")
        (folder / name).write_text(fault or "items")
        check(folder / name)

    monkeypatch.setattr(fineweb, "fetch", fetch)
    monkeypatch.setattr(hellaswag, "FOLDER", tmp_path / "data")
    monkeypatch.setattr(hellaswag, "SHA256", hashlib.sha256(b"items").hexdigest())
    if fault:
        with pytest.raises(tg.UserError, match=r"^cannot get hellaswag_val.jsonl from .*--file$"):
            hellaswag.download("someone/texts")
    else:
        assert hellaswag.download("someone/texts").read_text() == "items"
