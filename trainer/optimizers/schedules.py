"""Learning rates over steps."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from configs.spec import Count, Fraction, Positive, abstract_spec, spec

Schedule = Callable[[jax.Array], jax.Array]


@abstract_spec
class ScheduleSpec:
    """Holds the settings of a schedule; a run file names one of its kinds."""

    def rate(self, steps: int) -> Schedule:
        """Returns the learning rate of each step in a run of so many."""
        raise NotImplementedError


@spec
class InverseSqrt(ScheduleSpec):
    """Linear warmup to the peak, then peak x sqrt(warmup / step), linear to zero at the end.

    Shazeer and Stern 2018 (Adafactor), section 9, with Mesh-TensorFlow's last-tenth decay.
    """

    peak: Positive = 0.01
    """Largest learning rate."""
    warmup_steps: Count = 10_000
    """Steps of the linear warmup."""
    decay_fraction: Fraction = 0.1
    """The share of all steps, at the end, over which the rate falls to zero."""

    def rate(self, steps: int) -> Schedule:
        last_steps = max(1, round(steps * self.decay_fraction))

        def rate(step: jax.Array) -> jax.Array:
            done = step + 1.0
            warmup = self.peak * jnp.minimum(
                done / self.warmup_steps, jnp.sqrt(self.warmup_steps / done)
            )
            return warmup * jnp.minimum(1.0, (steps - step) / last_steps)

        return rate


@spec
class Cosine(ScheduleSpec):
    """Linear warmup to the peak, then half a cosine down to a share of it."""

    peak: Positive = 1e-3
    """Largest learning rate."""
    warmup_steps: Count = 100
    """Steps of the linear warmup."""
    final_fraction: Fraction = 0.1
    """Share of the peak that is left at the end."""

    def rate(self, steps: int) -> Schedule:
        return optax.warmup_cosine_decay_schedule(
            self.peak / self.warmup_steps,
            self.peak,
            self.warmup_steps,
            max(steps, self.warmup_steps + 1),
            self.peak * self.final_fraction,
        )


@spec
class Constant(ScheduleSpec):
    """Linear warmup, then the same rate for ever."""

    peak: Positive = 1e-3
    """Largest learning rate."""
    warmup_steps: Count = 1
    """Steps of the linear warmup."""

    def rate(self, steps: int) -> Schedule:
        return optax.linear_schedule(self.peak / self.warmup_steps, self.peak, self.warmup_steps)
