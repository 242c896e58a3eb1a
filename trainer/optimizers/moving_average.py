"""Keeps an exponential moving average of the weights, which decodes better than the last ones."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from trainer.optimizers.chain import Transform

FIRST_UPDATES = 10.0
"""After t updates the average moves by at least this / (this + t): the first has it forget the
weights that the run began with.  TensorFlow's ExponentialMovingAverage has 9 / (10 + t)."""


class AverageState(NamedTuple):
    """Holds the state of an optimizer, and the average of the weights that it updates."""

    inner: Any
    average: Any
    """In float32, or the type of the weights where that is wider."""
    updates: jax.Array


def keep_average(transform: Transform, decay: float) -> Transform:
    """Adds to the state the moving average of the weights after each update.

    What an update leaves to others, as a router's balance, enters with the next one.
    """

    def init(params: Any) -> AverageState:
        average = jax.tree.map(
            lambda weight: jnp.array(weight, jnp.promote_types(weight.dtype, jnp.float32)), params
        )
        return AverageState(transform.init(params), average, jnp.zeros((), jnp.int32))

    def update(updates: Any, state: AverageState, params: Any = None) -> tuple[Any, AverageState]:
        changes, inner = transform.update(updates, state.inner, params)
        share = jnp.maximum(1 - decay, FIRST_UPDATES / (FIRST_UPDATES + state.updates))

        def moved(average: jax.Array, weight: jax.Array) -> jax.Array:
            dtype = average.dtype
            return average + share.astype(dtype) * (weight.astype(dtype) - average)

        average = jax.tree.map(moved, state.average, optax.apply_updates(params, changes))
        return changes, AverageState(inner, average, state.updates + 1)

    return Transform(init, update)
