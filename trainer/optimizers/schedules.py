"""Defines learning rates over updates.

By convention, update n of a run, counted from 1, has the rate of optax's schedules at count n.  So
the first update moves the weights, update `warmup_steps` has the peak, and the last update has the
final rate.
"""

import abc
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from configs.errors import UserError
from configs.spec import Count, Fraction, Positive, abstract_spec, spec

Schedule = Callable[[jax.Array], jax.Array]


@abstract_spec
class ScheduleSpec(abc.ABC):
    """Holds the settings of a schedule; a run file names one of its kinds."""

    def rate(self, steps: int) -> Schedule:
        """Returns the learning rate by step, from 0, in a run of `steps` steps."""
        rate_of_update = self.rate_of_update(steps)
        return lambda step: rate_of_update(jnp.asarray(step + 1, float))

    @abc.abstractmethod
    def rate_of_update(self, steps: int) -> Schedule:
        """Returns the learning rate by update, from 1, in a run of `steps` steps."""


@abstract_spec
class Warmup(ScheduleSpec):
    """Holds the settings of a schedule that warms up linearly to a peak."""

    peak: Positive = 1e-3
    """Largest learning rate."""
    warmup_steps: Count = 100
    """Steps of the linear warmup; the last one uses the peak."""


@spec
class InverseSqrt(Warmup):
    """Warms up linearly to the peak, then decays as peak x sqrt(warmup / step), finally to 0.

    Shazeer and Stern 2018 (Adafactor), section 9, with Mesh-TensorFlow's decay over the last tenth.
    The rate reaches zero one step after the last.
    """

    peak: Positive = 0.01
    warmup_steps: Count = 10_000
    decay_fraction: Fraction = 0.1
    """Fraction of all steps, at the end, over which the rate falls to zero."""

    def rate_of_update(self, steps: int) -> Schedule:
        last_steps = max(1, round(steps * self.decay_fraction))

        def rate(update: jax.Array) -> jax.Array:  # optax has no inverse square root
            warmup = jnp.minimum(update / self.warmup_steps, jnp.sqrt(self.warmup_steps / update))
            return self.peak * warmup * jnp.minimum(1.0, (steps + 1 - update) / last_steps)

        return rate


@spec
class Cosine(Warmup):
    """Warms up linearly to the peak, then decays along half a cosine to a fraction of it."""

    final_fraction: Fraction = 0.1
    """Learning rate at the last step, as a fraction of the peak."""

    def rate_of_update(self, steps: int) -> Schedule:
        final = self.peak * self.final_fraction
        last = max(steps, self.warmup_steps + 1)
        return optax.warmup_cosine_decay_schedule(0.0, self.peak, self.warmup_steps, last, final)


@spec
class Constant(Warmup):
    """Warms up linearly, then keeps the rate constant."""

    warmup_steps: Count = 1

    def rate_of_update(self, steps: int) -> Schedule:
        return optax.linear_schedule(0.0, self.peak, self.warmup_steps)


@spec
class WarmupStableDecay(Warmup):
    """Warms up linearly, keeps the peak, and decays linearly at the end.  Hu et al. 2024 (MiniCPM).

    Before the decay, the rate does not depend on the number of steps.  A run can thus continue
    while copies of it decay from their newest checkpoint.
    """

    decay_fraction: Fraction = 0.1
    """Fraction of all steps, at the end, over which the rate decays."""
    decay_from: Count | None = None
    """Step after which the rate decays until the last step, such as the step of a checkpoint. None:
    decay_fraction decides."""
    final_fraction: Fraction = 0.0
    """Learning rate one step after the last, as a fraction of the peak."""

    def rate_of_update(self, steps: int) -> Schedule:
        first = self.decay_from or steps - round(steps * self.decay_fraction)
        if self.decay_from is not None and self.decay_from >= steps:
            raise UserError(
                f"WarmupStableDecay.decay_from = {self.decay_from}: the run ends at Run.steps = "
                f"{steps}.  Legal: a step before, or None."
            )
        if self.decay_from is not None and self.decay_from < self.warmup_steps:
            raise UserError(
                f"WarmupStableDecay.decay_from = {self.decay_from}: the rate still rises there, "
                f"with WarmupStableDecay.warmup_steps = {self.warmup_steps}.  Legal: a step from "
                "there on, or None."
            )
        first = max(first, self.warmup_steps)
        warmup = optax.linear_schedule(0.0, self.peak, self.warmup_steps)
        final = self.peak * self.final_fraction
        decay = optax.linear_schedule(self.peak, final, max(1, steps + 1 - first))
        return optax.join_schedules([warmup, decay], [first])
