"""Provides what optimizers share: clipping, weight decay of matrices, and weights by path."""

from collections.abc import Mapping
from typing import Any

import optax
from flax import traverse_util

from models.api import WeightInfo
from trainer.optimizers.schedules import Schedule

Tree = Any


def clip(norm: float | None) -> optax.GradientTransformation:
    return optax.identity() if norm is None else optax.clip_by_global_norm(norm)


def finish(
    parts: list[optax.GradientTransformation],
    weight_decay: float,
    rate: Schedule,
    weights: Mapping[str, WeightInfo],
) -> optax.GradientTransformation:
    """Chains the parts, then weight decay of matrices, then the learning rate."""
    if weight_decay:
        matrices = {path: bool(info.reads) for path, info in weights.items()}
        mask = traverse_util.unflatten_dict(matrices, sep="/")
        parts = [*parts, optax.add_decayed_weights(weight_decay, mask=mask)]
    return optax.chain(*parts, optax.scale_by_learning_rate(rate))


def by_path(transform: optax.GradientTransformation) -> optax.GradientTransformation:
    """Passes the transform its weights by path."""

    def flat(tree: Tree) -> Tree:
        return traverse_util.flatten_dict(tree, sep="/")

    def update(updates: Tree, state: Tree, params: Tree) -> tuple[Tree, Tree]:
        changed, state = transform.update(flat(updates), state, flat(params))
        return traverse_util.unflatten_dict(changed, sep="/"), state

    return optax.GradientTransformation(lambda params: transform.init(flat(params)), update)
