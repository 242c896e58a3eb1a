"""The settings of an optimizer, and what optimizers share; weights are told by their letters."""

from collections.abc import Mapping
from typing import Any

import optax
from flax import traverse_util

from configs.spec import abstract_spec
from layouts.axes import axes_of_path
from trainer.optimizers.schedules import ScheduleSpec

Tree = Any
Shapes = Mapping[str, tuple[int, ...]]
"""The true shape of each weight that has padding, by its path."""
NOT_PADDED: Shapes = {}


@abstract_spec
class OptimizerSpec:
    """Holds the settings of an optimizer; a run file names one of its kinds."""

    schedule: ScheduleSpec

    def transform(self, steps: int, padded: Shapes = NOT_PADDED) -> optax.GradientTransformation:
        """Returns the update of all weights in a run of so many steps."""
        raise NotImplementedError


def clip(norm: float | None) -> optax.GradientTransformation:
    return optax.identity() if norm is None else optax.clip_by_global_norm(norm)


def finish(
    parts: list[optax.GradientTransformation],
    weight_decay: float,
    schedule: ScheduleSpec,
    steps: int,
) -> optax.GradientTransformation:
    """Chains the parts, then weight decay of matrices, then the learning rate."""
    if weight_decay:
        parts = [*parts, optax.add_decayed_weights(weight_decay, mask=is_matrix)]
    return optax.chain(*parts, optax.scale_by_learning_rate(schedule.rate(steps)))


def is_matrix(params: Tree) -> Tree:
    """Tells whether each weight maps one axis to another: two letters or more beside the stack.

    >>> is_matrix({"layers_N": {"wi_DF": 0, "scale_D": 0}})
    {'layers_N': {'wi_DF': True, 'scale_D': False}}
    """
    paths = traverse_util.flatten_dict(params, sep="/")
    matrix = {path: len(axes_of_path(path).replace("N", "")) > 1 for path in paths}
    return traverse_util.unflatten_dict(matrix, sep="/")


def by_path(transform: optax.GradientTransformation) -> optax.GradientTransformation:
    """Gives the transform its weights by path."""

    def flat(tree: Tree) -> Tree:
        return traverse_util.flatten_dict(tree, sep="/")

    def update(updates: Tree, state: Tree, params: Tree) -> tuple[Tree, Tree]:
        changed, state = transform.update(flat(updates), state, flat(params))
        return traverse_util.unflatten_dict(changed, sep="/"), state

    return optax.GradientTransformation(lambda params: transform.init(flat(params)), update)
