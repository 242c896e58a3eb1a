"""Files of one JSON object a line."""

from pathlib import Path

import pytest

from trainer.metrics.jsonl import read_lines, split_lines


def test_a_line_cut_short_by_a_kill_is_neither_read_nor_damaged(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 3.0}\n{"step": 2, "lo')
    assert split_lines(path) == ([{"step": 1, "loss": 3.0}], [])
    assert split_lines(tmp_path / "none.jsonl") == ([], [])


def test_damaged_lines_cost_only_themselves(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n[1]\n{"step": true}\n\n{"step": 4}\n')
    assert read_lines(path) == [{"step": 1}, {"step": 4}]
    assert "2 damaged lines" in caplog.text
