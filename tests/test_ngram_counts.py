"""Tests bench/ngram.py --model: counts, the mixture and its fit, and what is printed of a saved model."""

import functools
import re
import sys

import numpy as np
import pytest

import train_gpt as tg
from launch import make_corpus, settings
from saved_model import load_model
from test_config import ROOT

sys.path.insert(0, str(ROOT / "bench"))
import ngram
import plain_gpt

BOS = 256


@pytest.fixture(scope="module")
def texts():
    """Returns a training text and another with parts of it, of documents of three symbols."""
    rng = np.random.default_rng(0)
    train = np.where(rng.random(600) < 0.02, BOS, rng.choice([0, 1, 255], 600))
    text = [BOS]
    for at in rng.integers(500, size=4):
        text += train[at : at + 70].tolist()
    return train.astype(np.uint16), np.array(text, np.uint16)


def followers_of(context, n, train):
    """Returns the tokens that follow each place where a text has the context of n tokens of one document."""
    followers = []
    if BOS not in context[1:]:
        for end in range(n, len(train)):
            if train[end - n : end] == context:
                followers.append(train[end])
    return followers


def test_counts_equal_brute_force(texts):
    train, text = texts
    counts = ngram.count_followers(train, text, 257)
    train = train.tolist()
    text = text.tolist()
    for n, found in zip(ngram.ORDERS, counts):
        for i in range(1, len(text)):
            context = text[max(0, i - n) : i]  # too short ones equal none
            followers = followers_of(context, n, train)
            assert found[:, i - 1].tolist() == [len(followers), followers.count(text[i])]
        assert found[1].any()


def test_mixed_probabilities_sum_to_one(texts):
    train, text = texts
    rng = np.random.default_rng(1)
    weights = rng.random((12, 33)) * (np.arange(33) > 0)
    for document in np.split(text, np.flatnonzero(text == BOS))[-5:]:
        each = np.concatenate([np.append(document, token) for token in range(257)]).astype(np.uint16)
        counts = ngram.count_followers(train, each, 257)[..., len(document) - 1 :: len(document) + 1]
        assert counts[0, 0].all()
        for p in ngram.mix(rng.dirichlet(np.ones(257)), counts, weights):
            assert p.sum() == pytest.approx(1, abs=1e-12)


def test_the_fit_lowers_the_loss(texts):
    """No constant weight does as well, nor the model alone."""
    train, text = texts
    counts = ngram.count_followers(train, text, 257)
    p = np.random.default_rng(3).uniform(0.2, 0.5, counts.shape[-1])

    def loss(weights):
        return -np.log(ngram.mix(p, counts, weights)[-1]).mean()

    fitted = loss(ngram.fit_weights(p, counts))
    is_found = np.ones((12, 1)) * (np.arange(33) > 0)
    for weight in 0, 0.1, 0.5:
        assert fitted < loss(weight * is_found)


def test_losses_of_a_saved_model(tmp_path, capsys):
    make_corpus(tmp_path / "corpus", train=(6000, 30000))
    cfg = functools.reduce(tg.override, settings()[1:], tg.CPU)
    path = f"{tmp_path}/m.pt"
    corpus = f"{tmp_path}/corpus"
    tg.save_model(path, tg.GPT(cfg), "run", tg.Exchange(0, 1))
    ngram.main(["--model", path, "--data", corpus])
    rows = re.findall(r"^(\d\S+) .* (?:alone|counts)(?:, (\S+) tokens)?", capsys.readouterr().out, re.M)
    losses = [float(loss) for loss, _ in rows]
    counted = [count for _, count in rows]
    val = tg.ValLoader(cfg, tg.find_shards(corpus, "val"))
    windows = tg.window_tokens(cfg, cfg.val_windows)
    expected = tg.validate(load_model(path), val, tg.Exchange(0, 1), windows)
    assert losses[0] == pytest.approx(expected, abs=6e-5)
    assert max(losses[1:]) < expected - 1  # the model has learned nothing
    trained = sum(stage.steps * stage.batch_tokens for stage in cfg.stages)
    assert counted[1:3] == [f"{trained:,}", f"{trained:,}"]
    assert "35,200" < counted[3] < "35,500"  # of 36,000

    for name, train in {"read": (2500,), "small": (6000, 6000)}.items():
        make_corpus(tmp_path / name, train)
        with pytest.raises(SystemExit, match="too few tokens are left"):
            ngram.main(["--model", path, "--data", f"{tmp_path}/{name}"])


def test_a_model_takes_no_option_of_counts():
    """They would have no effect."""
    for option in ("--orders", "--val-tokens"):
        with pytest.raises(SystemExit, match="^ngram.py: --model .*: leave out --val-tokens and --orders$"):
            ngram.main(["--model", "m.pt", option, "4"])


def test_there_is_no_mean_of_nothing():
    for main, option in (ngram.main, "--orders"), (ngram.main, "--val-tokens"), (plain_gpt.main, "--steps"):
        with pytest.raises(SystemExit, match="2"):
            main([option, "0"])
