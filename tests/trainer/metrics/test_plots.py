"""Curves of a run."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib import pyplot

from trainer.metrics import plots
from trainer.metrics.plots import RunPlots, curve, smoothed
from trainer.metrics.writers import MetricsFile


@pytest.mark.parametrize("count", [1, 2, 3, 50, 200])
def test_smoothing_keeps_a_line_and_so_does_not_lag(count: int) -> None:
    line = [9 - 0.03 * step for step in range(count)]
    np.testing.assert_allclose(smoothed(line), line, rtol=1e-9)


def test_smoothing_leaves_out_what_is_no_number() -> None:
    line = [9 - 0.03 * step for step in range(50)]
    broken = [*line]
    broken[20], broken[21], broken[49] = float("nan"), float("inf"), -float("inf")
    expected = np.where(np.isfinite(broken), line, np.nan)
    np.testing.assert_allclose(smoothed(broken), expected, rtol=1e-9)


def test_smoothing_is_not_above_a_loss_that_falls_fast_at_first() -> None:
    loss = [4.5 + 4.5 * 0.8**step + 2 * 0.98**step for step in range(300)]
    assert np.max(np.subtract(smoothed(loss), loss)) < 0.001  # of a fall of 6.5


def test_smoothing_is_hardly_above_a_loss_that_falls_faster_after_a_resume() -> None:
    """As with another learning rate; a fitted line is 0.07 above it."""
    loss = [7 - step / 100 if step < 40 else 5.2 + 1.4 * 0.92 ** (step - 40) for step in range(100)]
    assert np.max(np.subtract(smoothed(loss), loss)) < 0.05


def test_the_picture_of_the_loss_has_the_learning_rate_and_evaluations(tmp_path: Path) -> None:
    lines = [{"step": s, "loss": 3 / s, "learning_rate": s / 10} for s in (1, 2, 3)]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    for name in ("metrics", "evaluations"):
        (tmp_path / f"{name}.jsonl").write_text(text)
    figure = RunPlots(tmp_path)._loss(pyplot)
    losses, rate = figure.axes
    assert "validation" in [line.get_label() for line in losses.lines]
    assert rate.get_ylabel() == "learning rate"
    assert rate.lines[0].get_ydata() == pytest.approx([0.1, 0.2, 0.3])
    pyplot.close(figure)


def test_the_picture_of_one_step_has_points(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 3, "learning_rate": 0.1}\n')
    figure = RunPlots(tmp_path)._loss(pyplot)
    assert [line.get_marker() for axes in figure.axes for line in axes.lines] == ["o"] * 3
    pyplot.close(figure)


def test_a_comparison_marks_a_run_of_one_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line of one point would not be seen."""
    runs = {}
    for steps in (1, 3):
        folder = tmp_path / str(steps)
        folder.mkdir()
        lines = [{"step": s, "loss": 3 / s, "tokens": 9, "step_s": 1} for s in range(1, steps + 1)]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / "metrics.jsonl").write_text(text)
        runs[folder.name] = RunPlots(folder)
    monkeypatch.setattr(plots, "png_of", lambda draw: draw(pyplot))
    figure: Any = plots.compared(runs, "training", "loss")
    one, three = figure.axes[0].lines
    assert one.get_marker() == "o" and three.get_marker() == "None"
    pyplot.close(figure)


def test_a_comparison_names_the_runs_that_it_draws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = {}
    for name in ("evaluated", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text('{"step": 1, "loss": 3, "tokens": 9}\n')
        runs[name] = RunPlots(tmp_path / name)
    runs["evaluated"].checks.append({"step": 1, "loss": 2.0})
    monkeypatch.setattr(plots, "png_of", lambda draw: draw(pyplot))
    figure: Any = plots.compared(runs, "validation", "loss")
    assert [text.get_text() for text in figure.legends[0].texts] == ["evaluated"]
    pyplot.close(figure)


def test_many_runs_and_long_names_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "metrics.jsonl").write_text(
        "".join(f'{{"step": {i}, "loss": 3, "tokens": 9}}\n' for i in (1, 2))
    )
    names = [f"{'a' * 100}{i}" for i in range(12)]
    monkeypatch.setattr(plots, "png_of", lambda draw: draw(pyplot))
    figure: Any = plots.compared({name: RunPlots(tmp_path) for name in names}, "training", "loss")
    lines = figure.axes[0].lines
    assert len({(line.get_color(), line.get_linestyle()) for line in lines}) == 12
    shown = [text.get_text() for text in figure.legends[0].texts]
    assert len(set(shown)) == 12 and max(map(len, shown)) < 40
    pyplot.close(figure)


def test_experts_and_steps_are_whole_numbers() -> None:
    figure, axes = pyplot.subplots()
    plots.draw_load(axes, np.ones((4, 2)), extent=(1, 3, 3.5, -0.5))
    for ticks in (axes.get_xticks(), axes.get_yticks()):
        assert len(ticks) and not np.any(ticks % 1)
    pyplot.close(figure)


def keys_of(tree: object) -> set[str]:
    if not isinstance(tree, dict):
        return set()
    return set(tree).union(*(keys_of(value) for value in tree.values()))


def test_a_damaged_key_costs_no_more_than_its_line(tmp_path: Path) -> None:
    layer = {"load": [0.25, 0.75], "dropped": [0.0, 0.1], "idle": 0, "entropy": 0.5}
    train = {"loss": 3.0, "learning_rate": 0.1, "experts": {"decoder 0": layer}}
    part = {"loss": 2.0, "experts": {"decoder 0": layer}}
    check = {"loss": 2.0, "bleu": 3.0, "bleu_sentences": 50, "parts": {"de": part}}
    for name, line in (("metrics", train), ("evaluations", check)):
        whole = [json.dumps({"step": step, **line}) for step in range(1, 4)]
        for key in keys_of({"step": 0, **line}):
            damaged = whole[1].replace(f'"{key}"', f'"{key[:-1]}~"')
            for place in range(3):
                lines = [*whole[:place], damaged, *whole[place:]]
                (tmp_path / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
                if name == "metrics":
                    (tmp_path / "evaluations.jsonl").write_text("")
                plots = RunPlots(tmp_path)
                assert len(plots.with_experts) >= 3 and len(curve(plots.train, "loss")[0]) >= 3
                assert name == "metrics" or (
                    plots.parts == {"de": part} and len(plots.names()) == 5
                )
                MetricsFile(tmp_path / f"{name}.jsonl", 3).close()


def test_pictures_are_drawn_of_damaged_lines(tmp_path: Path) -> None:
    layer = {"load": [0.25, 0.75], "dropped": [0.0, 0.1]}
    line = {"loss": 3.0, "bleu": 3.0, "bleu_sentences": 50, "experts": {"decoder 0": layer}}
    lines = [{"step": step, **line, "parts": {"de": line}} for step in (1, 2, 3)]
    damages = ("loss", "bleu", "bleu_sentences", "experts", "dropped", "parts")
    whole = [json.dumps(line) for line in lines]
    broken = [whole[1].replace(f'"{key}"', '"~"', 1) for key in damages]
    broken.append(json.dumps({**lines[0], "loss": 10**400}))
    for name in ("metrics", "evaluations"):
        (tmp_path / f"{name}.jsonl").write_text("\n".join([*whole, *broken]) + "\n")
    plots = RunPlots(tmp_path)
    drawn = plots.save(tmp_path, *plots.names())
    assert sorted(drawn) == ["bleu", "dropped", "experts_of_parts", "load", "loss"]


def test_smoothing_removes_noise() -> None:
    noise = np.random.default_rng(0).normal(size=400)
    assert np.std(smoothed([*noise])) < np.std(noise) / 3
