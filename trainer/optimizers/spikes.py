"""Skips updates whose loss or gradient norm is far above those before them."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from configs.spec import Count, Positive, spec

Array = jax.Array
VALUES = ("loss", "grad_norm")
DECAY = 0.99  # of the mean and the variance
FIRST_STEPS = 20  # without a bound, because the statistics are of too few steps
LEAST_DEVIATION = 0.01  # of the mean, so the bound is not too tight if a loss hardly varies


class SpikeState(NamedTuple):
    """Holds moving statistics of the two `VALUES`, and counts of skipped updates."""

    mean: Array
    variance: Array
    steps: Array
    """Number of values in each mean, as int32."""
    in_row: Array
    """Number of updates skipped since the last one that was not."""
    total: Array
    """Number of updates skipped in the whole run."""


def counts_schedule(part: Any) -> bool:
    """Returns whether this part of an optimizer state counts the steps of the schedule."""
    return isinstance(part, optax.ScaleByScheduleState)


@spec
class SkipSpikes:
    """Skips each update whose loss or gradient norm is NaN, infinite, or far above that of the
    steps before.  Training continues with the next batch.

    The bound is the one of OLMo 2's SkipStepAdamW, with a moving average instead of its window of
    128 steps. PaLM skips the batches around a spike by hand (Chowdhery et al. 2022, section 5.1).
    """

    factor: Positive = 6.0
    """A spike is this many standard deviations above the mean of about the last 100 steps.
    """
    limit: Count = 10
    """The run stops if it skips more updates in a row."""

    def initial_state(self) -> SpikeState:
        values, zero = jnp.zeros(len(VALUES), float), jnp.zeros((), jnp.int32)
        return SpikeState(values, values, values.astype(jnp.int32), zero, zero)

    def bounds(self, state: SpikeState) -> Array:
        """Returns the largest loss and gradient norm that are no spikes."""
        deviation = jnp.sqrt(state.variance)
        deviation = jnp.maximum(deviation, LEAST_DEVIATION * jnp.abs(state.mean))
        bounds = state.mean + self.factor * deviation
        return jnp.where(state.steps < FIRST_STEPS, jnp.inf, bounds)

    def observe(self, state: SpikeState, values: Array) -> tuple[SpikeState, Array]:
        """Returns the statistics after a step, and whether to skip its update.

        A value beyond its bound counts as the bound.  So one spike hardly moves the bound, but the
        bound follows a loss that stays high, as after a change of the data.
        """
        bounds = self.bounds(state)
        is_spike = ~(jnp.isfinite(values) & (values <= bounds))
        values = jnp.where(is_spike, bounds, values)
        share = jnp.maximum(1 - DECAY, 1 / (state.steps + 1.0))
        difference = values - state.mean
        variance = (1 - share) * (state.variance + share * difference**2)
        is_known = jnp.isfinite(values)  # unlike NaN in the first steps
        skips = is_spike.any()
        return SpikeState(
            jnp.where(is_known, state.mean + share * difference, state.mean),
            jnp.where(is_known, variance, state.variance),
            state.steps + is_known,
            jnp.where(skips, state.in_row + 1, 0),
            state.total + skips,
        ), skips

    def checked(
        self, before: dict[str, Any], after: dict[str, Any], metrics: Mapping[str, Array]
    ) -> tuple[dict[str, Any], dict[str, Array]]:
        """Returns the state after a step, and further metrics.

        A skipped step changes only the step number and these statistics: no weight, no bias of a
        router, no moment or average.  The schedule counts the step.
        """
        state: SpikeState = before["spikes"]
        values = jnp.stack([metrics[name].astype(float) for name in VALUES])
        spikes, skips = self.observe(state, values)

        def chosen(new: Any, old: Any) -> Any:
            return new if new is old or counts_schedule(new) else jnp.where(skips, old, new)

        kept = jax.tree.map(chosen, after, before, is_leaf=counts_schedule)
        kept |= {"step": after["step"], "spikes": spikes}
        pairs = zip(VALUES, self.bounds(state), strict=True)
        bounds = {f"{name}_bound": bound for name, bound in pairs}
        return kept, {"skipped": spikes.in_row, "skipped_total": spikes.total, **bounds}
