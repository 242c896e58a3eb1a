"""Adafactor and AdamW, for optax; every decision about a weight is read off its letters."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import traverse_util

from configs.spec import Fraction, NotNegative, Positive, spec
from layouts.axes import axes_of_path
from trainer.optimizers.adafactor import (
    Shapes,
    clip_by_rms,
    scale_by_factored_rms,
    scale_by_weight_rms,
)
from trainer.optimizers.schedules import Constant, Cosine, InverseSqrt

Tree = Any
NOT_PADDED: Shapes = {}
AnySchedule = InverseSqrt | Cosine | Constant


@spec
class Adafactor:
    """Adafactor with the papers' settings.  Shazeer and Stern 2018, algorithms 4 to 7."""

    schedule: AnySchedule = InverseSqrt()
    decay_exponent: Positive = 0.8
    """The second moment's decay at step t is 1 - t^-exponent."""
    decay_cap: Fraction | None = None
    """No decay above this (GShard: 0.99)."""
    momentum: Fraction | None = None
    clip_update_rms: Positive = 1.0
    multiply_by_parameter_scale: bool = True
    factored_from: int = 128
    """A second moment is factored when its two longest axes are at least this long."""
    weight_decay: NotNegative = 0.0
    clip_global_norm: Positive | None = None

    def transform(self, steps: int, padded: Shapes = NOT_PADDED) -> optax.GradientTransformation:
        """The update of all weights, of which those with padding have these true shapes."""

        def decay(step: jax.Array) -> jax.Array:
            plain = 1.0 - (step + 1.0) ** -self.decay_exponent
            return plain if self.decay_cap is None else jnp.minimum(plain, self.decay_cap)

        parts = [
            scale_by_factored_rms(decay, self.factored_from, padded),
            clip_by_rms(self.clip_update_rms, padded),
        ]
        if self.multiply_by_parameter_scale:
            parts.append(scale_by_weight_rms(1e-3, padded))
        outer = [clip(self.clip_global_norm), by_path(optax.chain(*parts))]
        if self.momentum is not None:
            outer.append(optax.ema(self.momentum, debias=False))
        return finish(outer, self.weight_decay, self.schedule, steps)


@spec
class AdamW:
    """Adam with decoupled weight decay.  Loshchilov and Hutter 2019, algorithm 2."""

    schedule: AnySchedule = Cosine()
    beta1: Fraction = 0.9
    beta2: Fraction = 0.98
    epsilon: Positive = 1e-8
    weight_decay: NotNegative = 0.01
    clip_global_norm: Positive | None = 1.0

    def transform(self, steps: int, padded: Shapes = NOT_PADDED) -> optax.GradientTransformation:
        """The update of all weights.  Padding stays zero by itself."""
        adam = optax.scale_by_adam(self.beta1, self.beta2, self.epsilon)
        outer = [clip(self.clip_global_norm), adam]
        return finish(outer, self.weight_decay, self.schedule, steps)


Optimizer = Adafactor | AdamW


def clip(norm: float | None) -> optax.GradientTransformation:
    return optax.identity() if norm is None else optax.clip_by_global_norm(norm)


def finish(
    parts: list[optax.GradientTransformation],
    weight_decay: float,
    schedule: AnySchedule,
    steps: int,
) -> optax.GradientTransformation:
    """The parts, then weight decay of matrices, then the learning rate."""
    if weight_decay:
        parts = [*parts, optax.add_decayed_weights(weight_decay, mask=is_matrix)]
    return optax.chain(*parts, optax.scale_by_learning_rate(schedule.rate(steps)))


def is_matrix(params: Tree) -> Tree:
    """Whether each weight maps one axis to another: two letters or more, the stack not counted.

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
