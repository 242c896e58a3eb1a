"""Provides what optimizers share: clipping, weight decay, weights by path, moving averages."""

from collections.abc import Collection
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax
from flax import traverse_util

from layouts.shards import spec_of
from trainer.optimizers.optimizer import Infos
from trainer.optimizers.schedules import Schedule

Tree = Any
Transform: TypeAlias = optax.GradientTransformation
FIRST_UPDATES = 10.0
"""After t updates, the average moves by at least this / (this + t), so the first update replaces
the initial weights.  TensorFlow's ExponentialMovingAverage has 9 / (10 + t)."""


def clip(norm: float | None) -> Transform:
    return optax.identity() if norm is None else optax.clip_by_global_norm(norm)


def finish(parts: list[Transform], decay: float, rate: Schedule, weights: Infos) -> Transform:
    """Chains the parts, then weight decay of matrices, then the learning rate."""
    if decay:
        matrices = {path: bool(info.reads) for path, info in weights.items()}
        mask = traverse_util.unflatten_dict(matrices, sep="/")
        parts = [*parts, optax.add_decayed_weights(decay, mask=mask)]
    return optax.chain(*parts, optax.scale_by_learning_rate(rate))


def by_path(transform: Transform) -> Transform:
    """Passes weights to a transformation by path."""

    def flat(tree: Tree) -> Tree:
        return traverse_util.flatten_dict(tree, sep="/")

    def update(updates: Tree, state: Tree, params: Tree) -> tuple[Tree, Tree]:
        changed, state = transform.update(flat(updates), state, flat(params))
        return traverse_util.unflatten_dict(changed, sep="/"), state

    return Transform(lambda params: transform.init(flat(params)), update)


def split(paths: Collection[str], first: Transform, second: Transform) -> Transform:
    """Applies the first transform to the weights with these paths, and the second to all others."""

    def parts(flat: Tree) -> tuple[Tree, Tree]:
        chosen = {path: x for path, x in flat.items() if path in paths}
        return chosen, {path: x for path, x in flat.items() if path not in paths}

    def init(params: Tree) -> Tree:
        chosen, others = parts(params)
        return first.init(chosen), second.init(others)

    def update(updates: Tree, state: Tree, params: Tree) -> tuple[Tree, Tree]:
        (chosen, others), (chosen_params, other_params) = parts(updates), parts(params)
        chosen, chosen_state = first.update(chosen, state[0], chosen_params)
        others, other_state = second.update(others, state[1], other_params)
        return chosen | others, (chosen_state, other_state)

    return by_path(Transform(init, update))


def placed_by_compiler(transform: Transform) -> Transform:
    """Lets XLA choose the shardings in a transform; its updates and state keep their shardings.

    The transform then also runs under layouts that JAX's explicit sharding has no rules for.
    """

    def update(updates: Tree, state: Tree, params: Tree) -> tuple[Tree, Tree]:
        out = jax.tree.map(spec_of, (updates, state))
        return jax.sharding.auto_axes(transform.update, out_sharding=out)(updates, state, params)

    return Transform(transform.init, update)


class AverageState(NamedTuple):
    """Holds the state of an optimizer, and the average of the weights that it updates."""

    inner: Any
    average: Any
    """In float32, or in the type of the weights if that is wider."""
    updates: jax.Array


def keep_average(transform: Transform, decay: float) -> Transform:
    """Adds an exponential moving average of the weights to the state, and updates it.

    The average decodes better than the last weights.  Changes outside the update, such as a
    router's balance, enter with the next one.
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
