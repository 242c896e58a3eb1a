"""Files of one JSON object a line."""

import math
from pathlib import Path

import pytest

from trainer.metrics.jsonl import finite, is_number, read_lines, split_lines


def test_a_line_cut_short_by_a_kill_is_neither_read_nor_damaged(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 3.0}\n{"step": 2, "lo')
    assert split_lines(path) == ([{"step": 1, "loss": 3.0}], [])
    assert split_lines(tmp_path / "none.jsonl") == ([], [])


def test_damaged_lines_cost_only_themselves(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n[1]\n{"step": true}\n{"step": 1e308}\n\n{"step": 4}\n')
    assert read_lines(path) == [{"step": 1}, {"step": 4}]
    assert read_lines(path, "loss") == []
    (record,) = caplog.records  # once for a file
    assert record.getMessage() == f"{path}: damaged lines are left out."


@pytest.mark.parametrize("number", [0, -1.5, 3e38, float("inf"), float("-inf"), (1 << 63) - 1])
def test_what_float32_computes_can_be_drawn(number: float) -> None:
    assert is_number(number)


@pytest.mark.parametrize("other", [1e308, -1e40, 1 << 63, 10**400, True, None, "1", [1]])
def test_other_values_are_not_drawn(other: object) -> None:
    assert not is_number(other)


def test_a_skipped_step_may_lack_its_loss_and_is_not_drawn(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 3.0}\n{"step": 2, "skipped": 1, "loss": null}\n')
    lines, damaged = split_lines(path, "loss")
    assert [line["step"] for line in lines] == [1, 2] and not damaged
    assert read_lines(path, "loss") == lines[:1]
    path.write_text('{"step": 1, "loss": null}\n{"step": 2, "skipped": 1}\n')
    assert len(split_lines(path, "loss")[1]) == 2


def test_json_has_null_for_what_is_no_number() -> None:
    numbers = {"hours": {"steps": 1.5, "failures": math.inf}, "range": (2.0, math.nan, "s")}
    assert finite(numbers) == {"hours": {"steps": 1.5, "failures": None}, "range": [2.0, None, "s"]}
