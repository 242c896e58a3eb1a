"""Schedules at their corners, and against those of optax."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from trainer.optimizers.schedules import Constant, Cosine, InverseSqrt, ScheduleSpec

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
