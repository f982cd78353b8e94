"""Tests records/tracks.py: the tracks' constants are the presets', and other values are named."""

from dataclasses import asdict, replace

import pytest
import tracks

from train_gpt import PRESETS

pytestmark = pytest.mark.pinned(
    "the task of a preset's track (its data, target, validation or micro-batches)"
)
PRESET_OF = {"cpu": "cpu", "words": "words", "gpt2-small": "record"}


@pytest.mark.parametrize("track", tracks.TRACKS)
def test_the_presets_have_their_tracks_constants(track):
    cfg = PRESETS[PRESET_OF[track]]
    assert cfg.track == track
    assert tracks.differences(track, asdict(cfg)) == []


def test_other_values_are_named():
    """A listed record keeps its former target."""
    cfg = replace(PRESETS["cpu"], val_slices=1, target=3.5, heads=8)
    assert tracks.differences("cpu", asdict(cfg)) == ["target is 3.5, not 1.07", "val_slices is 1, not 128"]
    former = asdict(replace(PRESETS["words"], target=2.9))
    assert tracks.differences("words", former) == ["target is 2.9, not 2.5"]
    assert tracks.differences("words", former, is_listed=True) == []
