"""A model with experts through the commands: its numbers, its pictures, its warnings."""

from pathlib import Path

import pytest

from tests.scripts.conftest import Meshloom, Place
from trainer.metrics.jsonl import read_lines

EXPERTS = [
    "Transformer.layers = 2",
    'Transformer.pattern = ("dense", "moe")',
    "Transformer.moe = @Moe()",
    "Moe.experts = 4",
    "Moe.router = @Top2()",
    "Top2.capacity_factor = 0.25",
    "Top2.least_capacity = 1",
]


def test_a_run_with_experts_is_seen(run: Meshloom, place: Place) -> None:
    answer = run("train", place.model_dir, *place.flags(*EXPERTS))
    assert answer.code == 0, answer.error
    assert "warning: decoder 1:" in answer.out + answer.error and "found no place" in (
        answer.out + answer.error
    )
    lines = read_lines(place.folder / "run" / "metrics.jsonl")
    assert list(lines[-1]["experts"]) == ["decoder 1"]
    layer = lines[-1]["experts"]["decoder 1"]
    assert sum(layer["load"]) == pytest.approx(1) and len(layer["load"]) == 4
    assert 0 < layer["dropped"][0] < layer["dropped"][1] <= 1
    assert lines[-1]["objective"] > lines[-1]["loss"]

    answer = run("report", place.model_dir)
    assert answer.code == 0, answer.error
    page = (place.folder / "run" / "report.html").read_text()
    assert "decoder 1" in page and page.count("data:image/png;base64,") == 3
    assert "http" not in page  # it needs nothing from elsewhere
    for name in ("loss", "load", "dropped"):
        assert (place.folder / "run" / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_a_report_needs_a_run(run: Meshloom, tmp_path: Path) -> None:
    answer = run("report", f"--model_dir={tmp_path}")
    assert answer.code == 2 and "Train first." in answer.error
