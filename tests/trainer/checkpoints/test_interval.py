"""How often a run saves."""

import math

import pytest

from trainer.checkpoints.interval import DAY_S, LONGEST_S, SaveInterval, best_interval


def lost_share(every: int, save_s: float, step_s: float, failures_per_s: float) -> float:
    """Returns what saves and repeated steps cost of each second of steps."""
    return save_s / (every * step_s) + failures_per_s * every * step_s / 2


@pytest.mark.parametrize("save_s, step_s, failures_per_s", [(2, 0.5, 1e-4), (30, 12, 1e-5)])
def test_no_other_interval_costs_less(save_s: float, step_s: float, failures_per_s: float) -> None:
    best = best_interval(save_s, step_s, failures_per_s)
    costs = [lost_share(n, save_s, step_s, failures_per_s) for n in range(1, 3 * best)]
    assert min(costs) == pytest.approx(costs[best - 1], rel=1e-4)
    assert best_interval(save_s, step_s, failures_per_s, write_s=step_s * 2 * best) == 2 * best


def test_an_automatic_interval_follows_the_measured_times() -> None:
    interval = SaveInterval("auto", 100, devices=8192)
    assert [s for s in range(101, 113) if interval.is_due(s)] == [110, 111, 112]
    interval.saved(110, save_s=4.0, step_s=2.0)
    expected = round(math.sqrt(2 * 4 / (5e-4 * 8192 / DAY_S)) / 2)
    assert 1 < expected < LONGEST_S / 2
    assert not interval.is_due(109 + expected) and interval.is_due(110 + expected)
    small = SaveInterval("auto", 0, devices=1)
    small.saved(10, save_s=4.0, step_s=2.0)
    assert not small.is_due(9 + 1800) and small.is_due(10 + 1800)  # an hour


def test_a_given_interval_counts_steps_of_the_run() -> None:
    interval = SaveInterval(4, 2, devices=1)
    interval.saved(4, save_s=9.0, step_s=1.0)
    assert [step for step in range(1, 13) if interval.is_due(step)] == [4, 8, 12]
