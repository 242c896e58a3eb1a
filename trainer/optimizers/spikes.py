"""Skips updates by gradients that are far larger than those before them."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

DECAY = 0.99  # of the mean norm
FIRST_UPDATES = 20  # before which no norm is large: the mean is of too few
MAX_IN_ROW = 10
"""A run that skips more updates in a row stops."""


class SpikeState(NamedTuple):
    """Holds the state of an optimizer, and the norms of gradients so far."""

    inner: Any
    mean_norm: jax.Array
    """Moving average of the norms of gradients that were not skipped."""
    updates: jax.Array
    """Number of updates that were not skipped."""
    in_row: jax.Array
    """Number of updates skipped since the last one that was not."""


def skip_spikes(
    transform: optax.GradientTransformation, factor: float
) -> optax.GradientTransformation:
    """Skips updates whose gradient norm exceeds `factor` times its mean, or is not finite.

    Weights and the state of the optimizer then stay as they are.
    """

    def init(params: Any) -> SpikeState:
        count = jnp.zeros((), jnp.int32)
        return SpikeState(transform.init(params), jnp.zeros((), float), count, count)

    def update(updates: Any, state: SpikeState, params: Any = None) -> tuple[Any, SpikeState]:
        norm = optax.tree.norm(updates).astype(state.mean_norm.dtype)
        is_large = (state.updates >= FIRST_UPDATES) & (norm > factor * state.mean_norm)
        skips = is_large | ~jnp.isfinite(norm)

        def chosen(new: jax.Array, old: jax.Array) -> jax.Array:
            return jnp.where(skips, old, new)

        changes, inner = transform.update(updates, state.inner, params)
        share = jnp.maximum(1 - DECAY, 1 / (state.updates + 1.0))
        mean_norm = state.mean_norm + share * (norm - state.mean_norm)
        return jax.tree.map(lambda x: chosen(x, jnp.zeros_like(x)), changes), SpikeState(
            jax.tree.map(chosen, inner, state.inner),
            chosen(mean_norm, state.mean_norm),
            state.updates + ~skips,
            jnp.where(skips, state.in_row + 1, 0),
        )

    return optax.GradientTransformation(init, update)
