"""Tests records/pictures.py: the public records and README's pictures are what is committed."""

import pictures
import pytest
from compare import HERE


def test_the_pictures_and_the_table_are_what_their_sources_give():
    fix = "python records/pictures.py"
    for path, picture in pictures.read_pictures().items():
        assert picture.mark.encode() in path.read_bytes() and path.stat().st_size < 100_000, fix
    assert pictures.read_page() == (HERE / "README.md").read_text(), fix


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Writes another records/ and bench/curves, with one picture of each kind."""
    (tmp_path / "history.csv").write_text(
        'number,minutes,date,change,source\n1,45,2024-05-28,"all, at first",PR 1\n'
        "3,24.9,2024-10-04,Muon | more,PR 2\n3,25.0,2024-11-04,timed again,PR 3\n"
    )
    (tmp_path / "README.md").write_text("before\n<!-- history -->\nold\n<!-- /history -->\nafter\n")
    (tmp_path / "log.txt").write_text("step:1/1 val_loss:3.2 train_time:9ms step_avg:9ms\n")
    monkeypatch.setattr(pictures, "HERE", tmp_path)
    monkeypatch.setattr(pictures, "CURVES", tmp_path)
    monkeypatch.setattr(pictures, "PICTURES", {"a.png": ({"one": "log.txt"}, ("training time, s",))})
    return tmp_path


PAGE = """before
<!-- history -->
| # | minutes | date | change | source |
| --- | --- | --- | --- | --- |
| 1 | 45 | 2024-05-28 | all, at first | PR 1 |
| 3 | 24.9 | 2024-10-04 | Muon \\| more | PR 2 |
| 3 | 25.0 | 2024-11-04 | timed again | PR 3 |
<!-- /history -->
after
"""


@pytest.mark.slow
def test_the_table_is_written_and_pictures_are_drawn(folder):
    """(test_compare.py shows that only what changed is drawn.)"""
    pictures.main([])
    assert (folder / "README.md").read_text() == PAGE
    assert (folder / "a.png").exists() and (folder / "history.png").exists()


@pytest.mark.parametrize("line", ("", "4,1,24.5.2024,a,b", "4,1,2024-05-24,a,b"))
def test_nothing_is_written_if_a_file_cannot_be_read(folder, line):
    """A line of the history that is no record; or, if it is one, a log that is missing."""
    with open(folder / "history.csv", "a") as file:
        file.write(f"{line}\n")
    (folder / "log.txt").unlink()
    with pytest.raises(
        SystemExit, match="^pictures.py: .*/(history.csv:5 is no record|log.txt: no such file)"
    ):
        pictures.main([])
    assert "old" in (folder / "README.md").read_text()
