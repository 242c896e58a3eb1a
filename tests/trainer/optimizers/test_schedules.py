"""Schedules at their corners, and against those of optax."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from configs.errors import UserError
from trainer.optimizers.schedules import (
    Constant,
    Cosine,
    InverseSqrt,
    ScheduleSpec,
    WarmupStableDecay,
)

# Rates by update, counted from 1.
SCHEDULES = [
    (InverseSqrt(peak=0.01, warmup_steps=100), 10_000,
     {1: 1e-4, 50: 5e-3, 100: 0.01, 400: 5e-3, 9000: 0.01 * (100 / 9000) ** 0.5,
      9501: 0.01 * (100 / 9501) ** 0.5 * 0.5, 10_000: 0.001 * 0.001, 10_001: 0.0}),
    (InverseSqrt(peak=0.01, warmup_steps=10, decay_fraction=0.0), 1000,
     {10: 0.01, 999: 0.01 * (10 / 999) ** 0.5, 1000: 0.001, 1001: 0.0}),
    (Cosine(peak=0.3, warmup_steps=100, final_fraction=0.1), 1100,
     {1: 0.003, 100: 0.3, 600: 0.165, 1100: 0.03, 2000: 0.03}),
    (Cosine(peak=0.3, warmup_steps=100), 50, {1: 0.003, 50: 0.15}),
    (Constant(peak=0.5, warmup_steps=50), 1000, {1: 0.01, 25: 0.25, 50: 0.5, 999: 0.5}),
    (Constant(peak=0.5), 1000, {1: 0.5, 2: 0.5, 1000: 0.5}),
    (WarmupStableDecay(peak=0.5, warmup_steps=50), 1000,
     {1: 0.01, 50: 0.5, 900: 0.5, 950: 0.5 * 51 / 101, 1000: 0.5 / 101, 1001: 0.0}),
    (WarmupStableDecay(peak=0.5, warmup_steps=50, decay_from=400, final_fraction=0.2), 800,
     {25: 0.25, 51: 0.5, 400: 0.5, 600: 0.5 - 0.4 * 200 / 401, 801: 0.1}),
    (WarmupStableDecay(peak=0.5, warmup_steps=50), 20, {1: 0.01, 20: 0.2}),
    (WarmupStableDecay(peak=0.5, warmup_steps=50, decay_from=50), 60,
     {20: 0.2, 50: 0.5, 55: 0.5 * 6 / 11, 60: 0.5 / 11, 61: 0.0}),
]  # fmt: skip


@pytest.mark.parametrize(("schedule", "steps", "rates"), SCHEDULES, ids=lambda x: type(x).__name__)
def test_learning_rates_at_the_corners(
    schedule: ScheduleSpec, steps: int, rates: dict[int, float]
) -> None:
    rate = schedule.rate(steps)
    actual = [float(rate(jnp.int32(update - 1))) for update in rates]
    np.testing.assert_allclose(actual, [*rates.values()], rtol=1e-5, atol=1e-9)


def inverse_sqrt(peak: float, warmup: int) -> Callable[[Any], Any]:
    return optax.join_schedules(
        [optax.linear_schedule(0.0, peak, warmup), lambda n: peak * (warmup / (n + warmup)) ** 0.5],
        [warmup],
    )


@pytest.mark.parametrize(
    ("schedule", "by_update"),
    [
        (InverseSqrt(peak=0.3, warmup_steps=6, decay_fraction=0.01), inverse_sqrt(0.3, 6)),
        (Cosine(peak=0.3, warmup_steps=6, final_fraction=0.2),
         optax.warmup_cosine_decay_schedule(0.0, 0.3, 6, 40, 0.06)),
        (Constant(peak=0.3, warmup_steps=6), optax.warmup_constant_schedule(0.0, 0.3, 6)),
        (WarmupStableDecay(peak=0.3, warmup_steps=6, decay_fraction=0.25),
         optax.join_schedules([optax.warmup_constant_schedule(0.0, 0.3, 6),
                               optax.linear_schedule(0.3, 0.0, 11)], [30])),
    ],
    ids=lambda x: type(x).__name__,
)  # fmt: skip
def test_an_update_has_the_rate_of_its_number_in_optax(
    schedule: ScheduleSpec, by_update: Callable[[Any], Any]
) -> None:
    """All alike: the peak at the last update of the warmup, and nothing left out at the end."""
    steps = 40
    actual = [float(rate) for rate in jax.vmap(schedule.rate(steps))(jnp.arange(steps))]
    rates = [float(by_update(update)) for update in range(1, steps + 1)]
    np.testing.assert_allclose(actual, rates, rtol=1e-5)
    assert np.argmax(actual) == 6 - 1


def test_before_its_decay_a_run_may_become_longer() -> None:
    stable, longer = (WarmupStableDecay(peak=0.3, warmup_steps=6).rate(n) for n in (40, 80))
    steps = jnp.arange(36)
    np.testing.assert_array_equal(jax.vmap(stable)(steps), jax.vmap(longer)(steps))


def test_a_decay_behind_the_end_is_an_error() -> None:
    with pytest.raises(UserError, match=r"decay_from = 40: the run ends at Run.steps = 40"):
        WarmupStableDecay(decay_from=40).rate(40)
    with pytest.raises(UserError, match=r"decay_from = 40: the rate still rises .* = 41"):
        WarmupStableDecay(decay_from=40, warmup_steps=41).rate(90)
