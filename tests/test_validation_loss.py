"""Tests bench/validation_loss.py on the model of a run: its loss, parts of it, and slices it never read."""

import sys

import pytest

from launch import Launch, make_corpus, settings
from test_config import ROOT
from test_ngram_runs import closing_block, log_of

sys.path.insert(0, str(ROOT / "bench"))
import validation_loss


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Returns the folder of a run of 3 slices of 256 tokens; its corpus has 5."""
    folder = tmp_path_factory.mktemp("run")
    make_corpus(folder / "corpus", val=5 * 256 + 1)
    arguments = ["--preset", "cpu", "--data", "corpus", *settings("warmup=false"), "--save", "model.pt"]
    with Launch(folder, *arguments, world_size=0) as process:
        assert process.wait() == [0], process.err
    return folder


@pytest.fixture
def losses_of(run, monkeypatch, capsys):
    monkeypatch.chdir(run)

    def losses_of(*arguments):
        """Returns the first column of what is printed."""
        validation_loss.main(list(arguments))
        return [float(line.split()[0]) for line in capsys.readouterr().out.splitlines()]

    return losses_of


def test_its_default_is_the_runs_loss(run, losses_of):
    assert losses_of("model.pt") == [pytest.approx(float(closing_block(log_of(run))["val_loss"]), abs=6e-5)]


def test_slices_are_those_named(run, monkeypatch):
    """Losses of parts, also of slices that the run never read, average to those of the whole."""
    monkeypatch.chdir(run)
    each = [validation_loss.validation_loss("model.pt", (i, i + 1), None)[0] for i in range(5)]
    assert len(set(each)) == 5
    for first, end in ((0, 3), (1, 3), (3, 5), (0, 5)):
        loss = validation_loss.validation_loss("model.pt", (first, end), None)
        assert loss == (pytest.approx(sum(each[first:end]) / (end - first), rel=1e-6), first, end)


def test_several_models_and_their_mean(losses_of):
    one, two, mean = losses_of("model.pt", "model.pt", "--slices", "3:5")
    assert one == two == mean


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--slices", "3:6"], "corpus: 1,281 validation tokens, of 1,537 needed"),
        (["--slices", "3:3"], "'3:3' is not FIRST:END"),
        (["--slices", "128"], "'128' is not FIRST:END"),
        (["--data", "elsewhere"], "elsewhere"),
        (["other.pt"], "other.pt"),
    ],
)
def test_bad_input_gets_one_line(run, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(run)
    with pytest.raises(SystemExit) as error:
        validation_loss.main(["model.pt", *arguments])
    line = error.value.code if isinstance(error.value.code, str) else capsys.readouterr().err.splitlines()[-1]
    assert message in line and "\n" not in line
