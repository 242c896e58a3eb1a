"""A model with experts through the commands: its numbers, its pictures, its warnings."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.scripts.conftest import Meshloom, Place, call
from tests.toys import optax_promotion
from tests.trainer.command import write_text
from trainer.metrics.jsonl import read_lines

EXPERTS = [
    "Transformer.layers = 2",
    "Transformer.pattern = (@Block(), @experts/Block())",
    "experts/Block.feed_forward = @Moe()",
    "Moe.experts = 4",
    "Moe.router = @Top2()",
    "Top2.capacity_factor = 0.25",
    "Top2.evaluation_capacity_factor = 0.25",
    "Top2.least_capacity = 1",
]


def test_a_run_with_experts_is_seen(run: Meshloom, place: Place) -> None:
    answer = run("train", place.model_dir, *place.flags(*EXPERTS))
    assert answer.code == 0, answer.error
    assert "warning: decoder 1:" in answer.out + answer.error and "were dropped" in (
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


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """A model whose experts have room for few tokens; tests may read it."""
    folder = tmp_path_factory.mktemp("experts")
    place = Place(folder, write_text(folder / "text.txt"))
    with optax_promotion():
        assert call("train", place.model_dir, *place.flags(*EXPERTS)) == 0
    return place


def scores(run: Meshloom, place: Place, *lines: str) -> list[float]:
    (place.folder / "in.txt").write_text("".join(f"{line}\n" for line in lines))
    answer = run("score", place.model_dir, f"--input={place.folder / 'in.txt'}")
    assert answer.code == 0, answer.error
    return [float(row.split("\t")[0]) for row in answer.out.splitlines()[1:]]


def test_a_score_does_not_depend_on_other_lines(run: Meshloom, trained: Place) -> None:
    lines = ["kara lost", "mitu nevo kara", "kast"]
    together = scores(run, trained, *lines)
    alone = [scores(run, trained, line)[0] for line in lines]
    np.testing.assert_allclose(together, alone, rtol=1e-5)


def test_evaluate_drops_tokens_or_not_and_says_which(
    run: Meshloom, trained: Place, tmp_path: Path
) -> None:
    lines = trained.text.read_text().splitlines()[:9]
    (tmp_path / "in.txt").write_text("\n".join(lines) + "\n")
    losses = {}
    for flag, words in (("--drop_tokens", "beyond their evaluation"), ("--no_drop", "drop no")):
        flags = [f"--input={tmp_path / 'in.txt'}", f"--json={tmp_path / 'j'}", flag]
        answer = run("evaluate", trained.model_dir, *flags)
        assert answer.code == 0 and words in answer.out
        evaluation = json.loads((tmp_path / "j").read_text())
        assert evaluation["drop_tokens"] == (flag == "--drop_tokens")
        losses[flag] = evaluation["loss"]
    no_drop = -sum(scores(run, trained, *lines)) / evaluation["tokens"]
    np.testing.assert_allclose(losses["--no_drop"], no_drop, rtol=1e-5)
    assert abs(losses["--drop_tokens"] - no_drop) > 1e-3 * no_drop


def test_a_report_needs_a_run(run: Meshloom, tmp_path: Path) -> None:
    answer = run("report", f"--model_dir={tmp_path}")
    assert answer.code == 2 and "Train first." in answer.error
