"""Where the time of a run goes."""

import time

import pytest

from trainer.metrics.step_timer import ACTIVITIES, StepTimer


def test_activities_and_the_host_share_all_the_time() -> None:
    timer = StepTimer()
    for activity in ACTIVITIES:
        with timer.spending(activity):
            time.sleep(0.01)
    time.sleep(0.01)
    line = timer.rates(tokens=7)
    totals = [line[f"{activity}_total_s"] or 0 for activity in ("host", *ACTIVITIES)]
    assert min(totals) >= 0.01
    assert sum(totals) == pytest.approx(timer.last - timer.began)


def test_the_first_step_is_in_no_mean() -> None:
    timer = StepTimer()
    with timer.spending("data"):
        time.sleep(0.02)
    assert timer.rates(1)["data_stall_fraction"] == 0 and timer.step_s is None
    with timer.spending("data"):
        time.sleep(0.01)
    line = timer.rates(1)
    assert timer.step_s == line["step_s"] and 0.5 < (line["data_stall_fraction"] or 0) <= 1
