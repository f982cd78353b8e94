"""Tests bench/transfer.py: an effect by hand, and the page, which says which signs count."""

from pathlib import Path

import pytest

import transfer

RUNS = """\
{"run": ["", "cpu", "", 1], "label": "as it is", "loss": 2.0}
{"run": ["", "cpu", "", 2], "label": "as it is", "loss": 3.0}
{"run": ["", "cpu", "", 3], "label": "as it is", "loss": 9.0}
{"run": ["", "cpu", "bf16_mlp=false", 2], "label": "as it is", "loss": 9.0}
{"run": ["", "cpu", "", 2], "label": "a=1", "loss": 3.9}
{"run": ["", "cpu", "", 1], "label": "a=1", "loss": 2.1}
{"run": ["", "cpu", "bf16_mlp=false", 2], "label": "a=1", "loss": 9.3}
{"run": ["", "cpu", "bf16_mlp=false", 3], "label": "a=1", "loss": 1.0}
"""


def test_an_effect_is_the_loss_without_minus_with(tmp_path, monkeypatch):
    """Pairs have equal seeds and equal dtypes of the MLPs, one a seed; it is in thousandths of a nat.

    So 3.9 counts for nothing: its seed has a pair in fp32.
    """
    path = tmp_path / "runs.jsonl"
    path.write_text(RUNS)
    monkeypatch.setattr(transfer, "runs_of", lambda track: path)
    losses = transfer.read_losses("cpu")
    assert transfer.effect(("a=1", ""), losses) == pytest.approx((200, 100, 2))
    assert transfer.effect(("", "a=1"), losses) == pytest.approx((-200, 100, 2))
    assert transfer.effect(("b=1", ""), losses) is transfer.effect(None, losses) is None


def test_the_page_has_the_tables():
    page = Path(transfer.HERE.parent, "docs", "transfer.md").read_text()
    assert transfer.report(transfer.all_effects()) in page
