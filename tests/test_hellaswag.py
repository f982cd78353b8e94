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
        return "".join(rng.choice([*"abcdefg "], rng.integers(least, most)))

    return [Item(words(0, 40), [words(1, 9) for _ in range(4)], int(rng.integers(4))) for _ in range(count)]


def as_lines(items):
    lines = ({"ctx": item.context, "endings": item.endings, "label": item.label} for item in items)
    return "".join(json.dumps(line) + "\n" for line in lines)


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
    windows, n = tg.window_tokens(model.cfg, model.cfg.val_windows), len(document.tokens)

    def last_loss(text):
        batch = tg.make_micro_batch(text, tg.NO_ROWS, len(text), model.cfg)
        return model.token_losses(batch, windows)[-1].item()

    return np.array([last_loss(document.tokens[: i + 1]) for i in range(n - document.scored, n)])


# ---- Losses ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_packed_losses_are_those_of_each_text_alone(saved):
    """Whatever it is packed with: bigrams or n-grams, the smear and shifted keys look at the token before."""
    model, encoding = hellaswag.load(saved)
    items = [Item("abc " * 50, ["a"] * 4, 0), *some_items(5)]
    documents = [d for item in items for d in hellaswag.encode(item, encoding)][3:]
    first, second = list(hellaswag.batches(documents, 256))[:2]
    assert len(first) > 1 < len(second)
    for batch in (first, second, first[::-1]):
        for losses, document in zip(hellaswag.ending_losses(model, batch), batch, strict=True):
            np.testing.assert_allclose(losses, losses_alone(model, document), atol=1e-8, rtol=0)
    # In validation's micro-batches they would differ: these weights show it.
    lengths = [len(d.tokens) for d in second]
    tokens = np.concatenate([*(d.tokens for d in second), [0]])
    batch = tg.make_micro_batch(tokens, np.cumsum(lengths)[:-1], max(lengths), model.cfg)
    losses = model.token_losses(batch, tg.window_tokens(model.cfg, model.cfg.val_windows)).numpy()
    last = losses[len(losses) - 1 - second[-1].scored : -1]
    assert abs(last - losses_alone(model, second[-1])).max() > 1e-5


def test_scored_tokens_are_the_endings():
    """Also where a token could span the context's end."""
    ranks = {bytes([i]): i for i in range(256)} | {b"a ": 256, b" b": 257, b"bc": 258, b" bc": 259}
    special = {"<|endoftext|>": 260}
    encoding = tiktoken.Encoding("m", pat_str=r"[^.]+", mergeable_ranks=ranks, special_tokens=special)
    for item in some_items(50):
        for document, ending in zip(hellaswag.encode(item, encoding), item.endings, strict=True):
            bos, *tokens = document.tokens.tolist()
            parts = encoding.decode(tokens[: -document.scored]), encoding.decode(tokens[-document.scored :])
            assert (bos, *parts) == (260, item.context, f" {ending}")


# ---- Accuracy ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_printed_accuracies(saved, tmp_path, capsys):
    """Many batches, with items that begin in one and end in the next."""
    path, chosen = tmp_path / "items.jsonl", []
    path.write_text(as_lines(some_items(30, 5)))
    hellaswag.main([saved, "--file", str(path), "--limit", "16"])
    lines = capsys.readouterr().out.splitlines()
    model, encoding = hellaswag.load(saved)
    items = hellaswag.read_items(path, 16)
    losses = [[losses_alone(model, d) for d in hellaswag.encode(item, encoding)] for item in items]
    for line, name, loss_of in zip(lines, ("acc_norm", "acc"), (np.mean, np.sum)):
        chosen.append([np.argmin([*map(loss_of, four)]) for four in losses])
        p = np.mean([choice == item.label for choice, item in zip(chosen[-1], items)])
        assert line.split() == [name, f"{p:.4f}", "+-", f"{math.sqrt(p * (1 - p) / 16):.4f}"]
    assert chosen[0] != chosen[1]


# ---- Items -------------------------------------------------------------------------------------------------


def test_a_limit_takes_the_beginning_of_one_shuffled_order(tmp_path, monkeypatch):
    items, path = some_items(50), tmp_path / "items.jsonl"
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
DAMAGE = [  # cut, a list, without context, other endings, not UTF-8, other labels
    *(GOOD[:-9], b"[1, 2]", GOOD.replace(b"ctx", b"text"), GOOD.replace(b', "e"', b"")),
    *(GOOD.replace(b'"e"', b"5"), re.sub(rb"\[.*]", b'"bcde"', GOOD), GOOD.replace(b"a", b"\xff")),
    *(GOOD.replace(b"0", label) for label in (b"4", b'""', b"1.9", b"1.0", b"true", b"null", b'"12"')),
]


def test_damaged_and_missing_items_are_named(tmp_path):
    path = tmp_path / "items.jsonl"
    for line in DAMAGE:
        path.write_bytes(b"\n".join([GOOD, line, GOOD]))
        with pytest.raises(tg.UserError, match=f"^{path}:2: not an item"):
            hellaswag.read_items(path, 1)
    path.write_bytes(GOOD)
    for limit in (None, 4):
        with pytest.raises(tg.UserError, match=f"^{path} has 1 items, not {limit or 10042};"):
            hellaswag.read_items(path, limit)


# ---- Download ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", (None, "another file", "no server"))
def test_download(fault, tmp_path, monkeypatch):
    """What arrives is checked, and a failure is one line. (test_fineweb.py tests the download itself.)"""
    body, asked = as_lines(some_items(3)).encode(), []

    def fetch(folder, name, dataset, check):
        asked.append((folder.is_dir(), name, dataset))
        if fault == "no server":
            raise ConnectionError("refused\nat once")
        (folder / name).write_bytes(body)
        check(folder / name)

    monkeypatch.setattr(fineweb, "fetch", fetch)
    monkeypatch.setattr(hellaswag, "FOLDER", tmp_path / "data")
    monkeypatch.setattr(hellaswag, "SHA256", hashlib.sha256(body + b"x" * bool(fault)).hexdigest())
    monkeypatch.setattr(hellaswag, "load", lambda path: (None, None))
    if fault:
        with pytest.raises(SystemExit, match=r"^hellaswag.py: cannot get hellaswag_val.jsonl from .*--file$"):
            hellaswag.main(["m", "--dataset", "someone/texts"])
    else:
        assert hellaswag.download("someone/texts").read_bytes() == body
    assert asked == [(True, "hellaswag_val.jsonl", "someone/texts")]
