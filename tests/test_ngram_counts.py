"""Tests bench/ngram.py --model: counts, the mixture and its fit, and what is printed of a saved model."""

import re

import numpy as np
import pytest

import ngram
import train_gpt as tg
from golden_inputs import ALONE, val_loader
from launch import make_corpus
from test_evals import random_model, save

BOS = 256


@pytest.fixture(scope="module")
def texts():
    """Returns a training text and another with parts of it, of documents of three symbols."""
    train = np.random.default_rng(0).choice([0, 1, 255, BOS], 600, p=[0.4, 0.4, 0.18, 0.02]).astype(np.uint16)
    return train, np.concatenate([np.uint16([BOS]), train[400:500], train[100:200], train[150:230]])


def test_counts_equal_brute_force(texts):
    train, text = texts
    counts = ngram.count_followers(train, text, 257)
    train, text = train.tolist(), text.tolist()
    for n, found in zip(ngram.ORDERS, counts):
        for i in range(1, len(text)):
            context = text[max(0, i - n) : i]  # too short ones equal none
            followers = []
            if BOS not in context[1:]:  # of one document
                followers = [train[j] for j in range(n, len(train)) if train[j - n : j] == context]
            assert found[:, i - 1].tolist() == [len(followers), followers.count(text[i])]
        assert found[1].any()


def test_mixed_probabilities_sum_to_one(texts):
    """Over all next tokens of a document's beginning."""
    train, text = texts
    rng = np.random.default_rng(1)
    weights = rng.random((12, 33)) * (np.arange(33) > 0)
    beginnings = [np.append(text[:70], token) for token in range(257)]
    counts = ngram.count_followers(train, np.concatenate(beginnings), 257)[..., 69::71]
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
    for constant in 0, 0.1, 0.5:
        assert fitted < loss(constant * np.ones((12, 1)) * (np.arange(33) > 0))


def test_losses_of_a_saved_model(tmp_path, capsys):
    make_corpus(tmp_path / "corpus", train=(6000, 30000))
    model = random_model(tmp_path)
    cfg = model.cfg
    path = f"{tmp_path}/m.pt"
    save(path, model, "a fingerprint")
    ngram.main(["--model", path, "--data", cfg.data])
    out = capsys.readouterr().out
    assert "are not those that the model was trained on" in out
    rows = re.findall(r"^(\d\S+) .* (?:alone|counts)(?:, (\S+) tokens)?", out, re.M)
    losses = [float(loss) for loss, _ in rows]
    val = val_loader(cfg)
    windows = tg.window_tokens(cfg, cfg.val_windows)
    assert losses[0] == pytest.approx(tg.validate(model, val, ALONE, windows), abs=6e-5)
    assert max(losses[1:]) < losses[0] - 1  # the model has learned nothing
    assert rows[1][1] == f"{sum(stage.steps * stage.batch_tokens for stage in cfg.stages):,}"
    assert "35,200" < rows[3][1] < "35,500"  # of 36,000
    (tmp_path / "corpus/tiny_train_000001.bin").unlink()
    save(path, random_model(tmp_path, "length=4"))
    with pytest.raises(SystemExit, match="the run has read them"):
        ngram.main(["--model", path, "--data", cfg.data])


def test_a_model_takes_no_option_of_counts():
    """They would have no effect."""
    with pytest.raises(SystemExit, match="leave out --val-tokens and --orders$"):
        ngram.main(["--model", "m.pt", "--orders", "4"])
