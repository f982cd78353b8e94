"""Tests evals/hellaswag.py: its losses against the texts' alone, its accuracies, and its download."""

import hashlib
import json
import math
import sys

import huggingface_hub.constants as hub_settings
import numpy as np
import pytest
import tiktoken
import torch

import train_gpt as tg
from hub import Hub
from launch import Launch, make_corpus, settings
from test_config import ROOT

sys.path.insert(0, str(ROOT / "evals"))
import hellaswag
from hellaswag import Item

CHUNK = 10 << 20  # the hub's client writes chunks of this size
BYTES = hellaswag.tokenize_text.get_encoding("bytes")


def words(rng, least, most):
    return "".join(rng.choice([*"abcdefg "], rng.integers(least, most)))


def some_items(count, seed=0):
    rng = np.random.default_rng(seed)
    ending = lambda: words(rng, 1, 9)  # noqa: E731
    return [Item(words(rng, 0, 40), [ending() for _ in range(4)], int(rng.integers(4))) for _ in range(count)]


def as_line(item):
    return json.dumps({"ind": 1, "ctx": item.context, "endings": item.endings, "label": item.label})


def write(path, items):
    path.write_text("".join(as_line(item) + "\n" for item in items))
    return path


@pytest.fixture(scope="module", params=[(), ("ngrams.orders=2,3,5", "ngrams.rows=301", "ngrams.width=12")])
def saved(request, tmp_path_factory):
    """Returns the file of a saved model of bytes, with bigrams or n-grams, and strong weights everywhere."""
    folder = tmp_path_factory.mktemp("run")
    make_corpus(folder / "corpus")
    options = ["--preset", "cpu", "--data", "corpus", "--save", "model.pt"]
    with Launch(folder, *options, *settings("warmup=false", *request.param)) as process:
        assert process.wait() == [0], process.err
    saved = torch.load(folder / "model.pt", weights_only=True)
    generator = torch.Generator().manual_seed(1)
    for weight in saved["weights"].values():
        if weight.is_floating_point():
            weight += 0.2 * torch.randn(weight.shape, generator=generator)
    torch.save(saved, folder / "model.pt")
    return folder / "model.pt"


def losses_alone(model, document):
    """Returns an ending's losses, each by a forward of the text before its token and nothing else."""
    windows, n = tg.window_tokens(model.cfg, model.cfg.val_windows), len(document.tokens)

    def last_loss(text):
        batch = tg.make_micro_batch(text, tg.NO_ROWS, len(text), 2, model.cfg)
        return model.token_losses(batch.pack(), windows)[-1].item()

    return np.array([last_loss(document.tokens[: i + 1]) for i in range(n - document.scored, n)])


# ---- Losses ------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.numeric
def test_packed_losses_are_those_of_each_text_alone(saved):
    """Whatever it is packed with: bigrams or n-grams, the smear and shifted keys look at the token before."""
    model, encoding = hellaswag.load(str(saved))
    items = [Item("abc " * 50, ["a"] * 4, 0), *some_items(5)]
    documents = [d for item in items for d in hellaswag.encode(item, encoding)][3:]
    first, second = list(hellaswag.batches(documents, 256))[:2]
    assert len(first) > 1 < len(second)
    for batch in (first, second, first[::-1]):
        for losses, document in zip(hellaswag.ending_losses(model, batch), batch, strict=True):
            np.testing.assert_allclose(losses, losses_alone(model, document), atol=1e-5, rtol=0)
    # In validation's micro-batches they would differ: these weights show it.
    lengths = [len(d.tokens) for d in second]
    tokens = np.concatenate([*(d.tokens for d in second), [0]])
    batch = tg.make_micro_batch(tokens, np.cumsum(lengths)[:-1], max(lengths), 30, model.cfg).pack()
    losses = model.token_losses(batch, tg.window_tokens(model.cfg, model.cfg.val_windows)).numpy()
    last = losses[len(losses) - 1 - second[-1].scored : -1]
    assert abs(last - losses_alone(model, second[-1])).max() > 1e-4


@pytest.mark.parametrize("seed", range(5))
def test_scored_tokens_are_the_endings(seed):
    """Also where a token could span the context's end."""
    ranks = {bytes([i]): i for i in range(256)} | {b"a ": 256, b" b": 257, b"bc": 258, b" bc": 259}
    merging = tiktoken.Encoding(
        "m", pat_str=r"[^.]+", mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 260}
    )
    for encoding in (BYTES, merging):
        for item in some_items(20, seed):
            for document, ending in zip(hellaswag.encode(item, encoding), item.endings, strict=True):
                bos, *tokens = document.tokens.tolist()
                assert bos == encoding.eot_token
                assert encoding.decode(tokens) == f"{item.context} {ending}"
                assert encoding.decode(tokens[len(tokens) - document.scored :]) == f" {ending}"


# ---- Accuracy ----------------------------------------------------------------------------------------------


def test_choices_by_means_and_sums():
    losses = [
        *([1, 1, 1], [2], [0.5, 9], [3, 3]),  # lowest mean: 0; lowest sum: 1
        *([2, 2], [4, 4], [9], [1, 1, 1]),  # 3 and 3
        *([1], [1], [2], [2]),  # a tie: the first
    ]
    losses = list(map(np.array, losses))
    for labels, right in [
        ((0, 3, 0), [[True, False], [True, True], [True, True]]),
        ((1, 2, 1), [[False, True], [False, False], [False, False]]),
    ]:
        found = [hellaswag.score(losses[4 * i : 4 * i + 4], label) for i, label in enumerate(labels)]
        assert np.array_equal(found, right)


@pytest.mark.slow
def test_printed_accuracies(saved, tmp_path, capsys):
    """Many batches, with items that begin in one and end in the next."""
    path = write(tmp_path / "items.jsonl", some_items(20, 3))
    hellaswag.main([str(saved), "--file", str(path), "--limit", "12"])
    model, encoding = hellaswag.load(str(saved))
    right = {"acc_norm": 0, "acc": 0}
    for item in hellaswag.read_items(path, 12):
        losses = [losses_alone(model, document) for document in hellaswag.encode(item, encoding)]
        for name, choose in (("acc_norm", np.mean), ("acc", np.sum)):
            right[name] += min(range(4), key=lambda i: choose(losses[i])) == item.label
    printed = capsys.readouterr().out
    for line, (name, count) in zip(printed.splitlines(), right.items()):
        p = count / 12
        assert line.split() == [name, f"{p:.4f}", "+-", f"{math.sqrt(p * (1 - p) / 12):.4f}"]
    assert printed.splitlines()[2].startswith("chance   0.2500; 12 items of ")


# ---- Items -------------------------------------------------------------------------------------------------


def test_a_limit_takes_the_beginning_of_one_shuffled_order(tmp_path, monkeypatch):
    items = some_items(50)
    path = write(tmp_path / "items.jsonl", items)
    monkeypatch.setattr(hellaswag, "ITEMS", 50)
    found = hellaswag.read_items(path)
    assert found != items and sorted(found) == sorted(items)
    for limit in (1, 20, 50):
        assert hellaswag.read_items(path, limit) == found[:limit]
    # The dataset on the hub has labels as text.
    path.write_text(path.read_text().replace('"label": 2', '"label": "2"'))
    assert hellaswag.read_items(path) == found


GOOD = {"ctx": "a", "endings": ["b", "c", "d", "e"], "label": 0}
DAMAGE = {
    "cut": json.dumps(GOOD)[:-9],
    "empty": "",
    "a list": "[1, 2]",
    "no context": json.dumps({"endings": GOOD["endings"], "label": 0}),
    "three endings": json.dumps(GOOD | {"endings": ["b", "c", "d"]}),
    "a number": json.dumps(GOOD | {"endings": ["b", "c", "d", 5]}),
    "label 4": json.dumps(GOOD | {"label": 4}),
    "label -1": json.dumps(GOOD | {"label": -1}),
    "of the test split": json.dumps(GOOD | {"label": ""}),
    "not UTF-8": json.dumps(GOOD).replace("a", "\udcff"),
}


def error_of(*arguments):
    """Returns the one line with which the script ends."""
    with pytest.raises(SystemExit) as error:
        hellaswag.main([str(argument) for argument in arguments])
    assert isinstance(error.value.code, str) and "\n" not in error.value.code
    return error.value.code


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_item_is_named(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(hellaswag, "load", lambda path: (None, None))
    path = tmp_path / "items.jsonl"
    path.write_bytes(
        "\n".join([json.dumps(GOOD), DAMAGE[kind], json.dumps(GOOD)]).encode(errors="surrogateescape")
    )
    assert error_of("m", "--file", path, "--limit", "1").startswith(f"hellaswag.py: {path}:2: not an item")


@pytest.mark.parametrize("limit, wanted", (((), "10042"), (("--limit", "4"), "4")))
def test_the_number_of_items_is_checked(tmp_path, monkeypatch, limit, wanted):
    monkeypatch.setattr(hellaswag, "load", lambda path: (None, None))
    path = write(tmp_path / "items.jsonl", some_items(3))
    assert f"{path} has 3 items, not {wanted};" in error_of("m", "--file", path, *limit)


# ---- Download ----------------------------------------------------------------------------------------------


DATASET = "someone/texts"
BODY = ("\n".join(as_line(item) for item in some_items(30)) + "\n").encode()


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Returns a hub whose file is the original."""
    with Hub({hellaswag.NAME: BODY}, DATASET) as hub:
        template = hub_settings.HUGGINGFACE_CO_URL_TEMPLATE.removeprefix(hub_settings.ENDPOINT)
        address = f"http://127.0.0.1:{hub.port}"
        monkeypatch.setattr(hub_settings, "ENDPOINT", address)
        monkeypatch.setattr(hub_settings, "HUGGINGFACE_CO_URL_TEMPLATE", address + template)
        monkeypatch.setattr(hub_settings, "HF_HUB_OFFLINE", False)
        for name in ("NO_PROXY", "no_proxy"):
            monkeypatch.setenv(name, "*")
        monkeypatch.setattr(hellaswag, "FOLDER", tmp_path / "data")
        monkeypatch.setattr(hellaswag, "SHA256", hashlib.sha256(BODY).hexdigest())
        yield hub


def partial(body):
    """Returns the file that an unfinished download of `body` writes."""
    hellaswag.FOLDER.mkdir()
    return hellaswag.FOLDER / f"{hellaswag.NAME}.{hashlib.sha256(body).hexdigest()[:16]}.tmp"


def files():
    return {path.name: path.read_bytes() for path in hellaswag.FOLDER.iterdir()}


def test_the_original_is_downloaded_once(hub):
    path = hellaswag.download(DATASET)
    assert path.read_bytes() == BODY and files() == {hellaswag.NAME: BODY}
    assert hub.requests == [(hellaswag.NAME, None)]
    assert hellaswag.download(DATASET) == path and len(hub.requests) == len(hub.heads) == 1
    assert len(hellaswag.read_items(path, 30)) == 30


@pytest.mark.parametrize("fault", ("another file", "damaged", "missing", "no server"))
def test_what_is_not_the_original_is_not_kept(hub, monkeypatch, fault):
    monkeypatch.setattr(hellaswag, "load", lambda path: (None, None))
    message = {
        "another file": "not the original, whose SHA-256 begins with",
        "damaged": "its checksum is not the hub's",
        "missing": "404",
        "no server": "refused",
    }[fault]
    if fault == "another file":
        hub.files[hellaswag.NAME] = BODY.replace(b"a", b"b")
    elif fault == "damaged":
        partial(BODY).write_bytes(b"x" * 9)
    elif fault == "missing":
        hub.files.clear()
    else:
        hub.server.server_close()
        hub.server.shutdown()
    error = error_of("m", "--dataset", DATASET)
    assert message in error and "cannot get hellaswag_val.jsonl from" in error and "--file" in error
    assert files() == {}
