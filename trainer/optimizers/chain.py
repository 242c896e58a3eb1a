"""Provides parts that optimizers share, and the end of their chains, by the letters of weights."""

from typing import Any

import optax
from flax import traverse_util

from layouts.axes import axes_of_path
from trainer.optimizers.schedules import Schedule

Tree = Any


def clip(norm: float | None) -> optax.GradientTransformation:
    return optax.identity() if norm is None else optax.clip_by_global_norm(norm)


def finish(
    parts: list[optax.GradientTransformation],
    weight_decay: float,
    rate: Schedule,
) -> optax.GradientTransformation:
    """Chains the parts, then weight decay of matrices, then the learning rate."""
    if weight_decay:
        parts = [*parts, optax.add_decayed_weights(weight_decay, mask=is_matrix)]
    return optax.chain(*parts, optax.scale_by_learning_rate(rate))


def is_matrix(params: Tree) -> Tree:
    """Returns whether each weight maps one axis to another: two letters or more beside the stack.

    The letters of heads count as one: a bias of queries is no matrix.

    >>> is_matrix({"layers_N": {"wi_DF": 0, "scale_D": 0, "bq_JQK": 0}})
    {'layers_N': {'wi_DF': True, 'scale_D': False, 'bq_JQK': False}}
    """
    paths = traverse_util.flatten_dict(params, sep="/")
    axes = {path: axes_of_path(path).replace("N", "") for path in paths}
    matrix = {path: len(of) > 1 and not set(of) <= set("JQK") for path, of in axes.items()}
    return traverse_util.unflatten_dict(matrix, sep="/")


def by_path(transform: optax.GradientTransformation) -> optax.GradientTransformation:
    """Passes the transform its weights by path."""

    def flat(tree: Tree) -> Tree:
        return traverse_util.flatten_dict(tree, sep="/")

    def update(updates: Tree, state: Tree, params: Tree) -> tuple[Tree, Tree]:
        changed, state = transform.update(flat(updates), state, flat(params))
        return traverse_util.unflatten_dict(changed, sep="/"), state

    return optax.GradientTransformation(lambda params: transform.init(flat(params)), update)
