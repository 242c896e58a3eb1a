"""The history of a model directory."""

import json
from pathlib import Path

from trainer.resume.history import FILE, Change, record_start, starts


def test_each_start_is_a_line(tmp_path: Path) -> None:
    assert starts(tmp_path / "run") == []
    record_start(tmp_path / "run", 0, tmp_path / "data", "abc", [])
    record_start(tmp_path / "run", 7, tmp_path / "data", "abc", [Change("Run.steps", 5, None)])
    first, second = starts(tmp_path / "run")
    assert (first.step, first.content_hash, list(first.changes)) == (0, "abc", [])
    assert (second.step, second.data_dir) == (7, str(tmp_path / "data"))
    assert second.changes == [{"name": "Run.steps", "old": "5", "new": "None"}]


def test_lines_of_other_versions_are_read(tmp_path: Path) -> None:
    lines = [{"step": 1, "time": "then", "unknown": 3}, {"step": 2}]
    (tmp_path / FILE).write_text("".join(json.dumps(line) + "\n" for line in lines))
    (start,) = starts(tmp_path)
    assert (start.step, start.time, start.data_dir) == (1, "then", None)
