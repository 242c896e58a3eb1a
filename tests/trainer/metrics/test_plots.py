"""Curves of a run."""

import json
from pathlib import Path

import numpy as np
import pytest
from matplotlib import pyplot

from trainer.metrics.plots import RunPlots, smoothed


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
    assert np.max(np.subtract(smoothed(loss), loss)) < 0.05  # of a fall of 6.5


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


def test_smoothing_removes_noise() -> None:
    noise = np.random.default_rng(0).normal(size=400)
    assert np.std(smoothed([*noise])) < np.std(noise) / 3
