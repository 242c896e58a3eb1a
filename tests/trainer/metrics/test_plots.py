"""Curves of a run."""

from trainer.metrics.plots import smoothed


def test_smoothing_keeps_a_constant_and_follows_a_step() -> None:
    assert [round(x, 12) for x in smoothed([3.0] * 5)] == [3.0] * 5
    rising = smoothed([0.0] * 3 + [1.0] * 3)
    assert rising[:3] == [0, 0, 0] and 0 < rising[3] < rising[4] < rising[5] < 1
