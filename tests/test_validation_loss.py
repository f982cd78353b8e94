"""Tests bench/validation_loss.py on the model of a run: its loss, parts of it, and slices it never read."""

import shutil
import sys

import pytest

from launch import Launch, make_corpus, settings
from test_config import ROOT
from test_ngram_runs import closing_block, log_of

sys.path.insert(0, str(ROOT / "bench"))
import validation_loss

NGRAMS = ("ngrams.orders=2,3", "ngrams.rows=301", "ngrams.width=12")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Returns the folder of a run of 3 slices of 256 tokens, with n-grams; its corpus has 5."""
    folder = tmp_path_factory.mktemp("run")
    make_corpus(folder / "corpus", val=5 * 256 + 1)
    arguments = [
        "--preset",
        "cpu",
        "--data",
        "corpus",
        *settings("warmup=false", *NGRAMS),
        "--save",
        "model.pt",
    ]
    with Launch(folder, *arguments, world_size=0) as process:
        assert process.wait() == [0], process.err
    return folder


@pytest.fixture(autouse=True)
def here(run, monkeypatch):
    monkeypatch.chdir(run)


def losses_of(capsys, *arguments):
    """Returns the first column of what is printed."""
    validation_loss.main([*arguments, "--data", "corpus"])
    return [float(line.split()[0]) for line in capsys.readouterr().out.splitlines()]


def test_its_default_is_the_runs_loss(run, capsys):
    loss = float(closing_block(log_of(run))["val_loss"])
    assert losses_of(capsys, "model.pt") == [pytest.approx(loss, abs=6e-5)]


def test_slices_are_those_named():
    """Losses of parts, also of slices that the run never read, average to those of the whole."""
    each = [validation_loss.validation_loss("model.pt", (i, i + 1), "corpus")[0] for i in range(5)]
    assert len(set(each)) == 5
    for first, end in ((0, 3), (1, 3), (3, 5), (0, 5)):
        loss, what = validation_loss.validation_loss("model.pt", (first, end), "corpus")
        assert loss == pytest.approx(sum(each[first:end]) / (end - first), rel=1e-6)
        assert what.startswith(f"slices {first}:{end} of ") and "1281 for validation" in what


def test_several_models_and_their_mean(capsys, monkeypatch):
    monkeypatch.setattr(validation_loss, "validation_loss", lambda path, slices, data: (float(path), ""))
    assert losses_of(capsys, "1", "2", "6") == [1, 2, 6, 3]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["model.pt", "--slices", "3:6"], "corpus has 5 validation slices of 256 tokens, not 6"),
        (["model.pt", "--slices", "3:3"], "'3:3' is not FIRST:END"),
        (["model.pt", "--slices", "128"], "'128' is not FIRST:END"),
        (["model.pt", "--data", "elsewhere"], "in elsewhere: "),
        (["other.pt"], "No such file or directory: 'other.pt'"),
        (["alone.pt"], "cannot read alone.pt.ngrams: "),
    ],
)
def test_bad_input_gets_one_line(capsys, arguments, message):
    shutil.copy("model.pt", "alone.pt")
    with pytest.raises(SystemExit) as error:
        validation_loss.main(["--data", "corpus", *arguments])
    line = error.value.code if isinstance(error.value.code, str) else capsys.readouterr().err.splitlines()[-1]
    assert message in line and "\n" not in line
