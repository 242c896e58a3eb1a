"""Curves of a run."""

import numpy as np
import pytest

from trainer.metrics.plots import smoothed


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


def test_smoothing_removes_noise() -> None:
    noise = np.random.default_rng(0).normal(size=400)
    assert np.std(smoothed([*noise])) < np.std(noise) / 3
