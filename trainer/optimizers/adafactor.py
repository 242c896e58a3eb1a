"""Makes Adafactor as optax transformations, for weights that may be stacked or padded.

Adafactor uses a weight's two longest axes and its root mean square.  Neither may span layers, or
the result would depend on how layers are stored.  Neither may span experts, or the moments would
not be sharded like the experts.  Every mean divides by the unpadded size.  Trees are dicts by path.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from configs.errors import UserError
from configs.spec import Fraction, NotNegative, Positive, spec
from layouts.layout import Layout
from models.api import WeightInfo
from trainer.optimizers import chain
from trainer.optimizers.optimizer import FloatType, Infos, OptimizerSpec
from trainer.optimizers.schedules import InverseSqrt, ScheduleSpec

Array = jax.Array
Weights = dict[str, Array]
EPSILON = 1e-30  # added to squares: Shazeer and Stern 2018, section 6


@spec
class Adafactor(OptimizerSpec):
    """Uses Adafactor with the papers' settings.  Shazeer and Stern 2018, algorithms 4 to 7."""

    schedule: ScheduleSpec = InverseSqrt()
    decay_exponent: Positive = 0.8
    """The second moment's decay at step t is 1 - t^-exponent."""
    decay_cap: Fraction | None = None
    """Upper bound of the decay (GShard: 0.99)."""
    momentum: Fraction | None = None
    """Decay of the first moment. None: no first moment."""
    first_moment: FloatType | None = None
    """Type of the stored first moment. None: the type of the weights."""
    clip_update_rms: Positive = 1.0
    """Scales an update down to this root mean square (RMS) if its RMS is larger."""
    multiply_by_parameter_scale: bool = True
    """Multiplies an update by the RMS of its weight, or by 0.001 if the RMS is smaller."""
    factored_from: int = 128
    """A second moment is factored if its two longest axes are at least this long."""
    weight_decay: NotNegative = 0.0
    """Each step subtracts this share of each matrix, times the learning rate."""
    clip_global_norm: Positive | None = None
    """Scales all gradients down to this norm if they exceed it."""

    def __post_init__(self) -> None:
        if self.first_moment is not None and self.momentum is None:
            raise UserError("Adafactor.first_moment: there is none.  Set Adafactor.momentum.")

    def transform(self, steps: int, weights: Infos, layout: Layout) -> optax.GradientTransformation:
        """Returns the transformation of these weights, by path; `weights` has unpadded shapes."""
        scaling = FactoredScaling(self.decay, self.factored_from, weights)
        parts = [
            optax.GradientTransformation(scaling.init, scaling.update),
            clip_by_rms(self.clip_update_rms, weights),
        ]
        if self.multiply_by_parameter_scale:
            parts.append(scale_by_weight_rms(1e-3, weights))
        outer = [chain.clip(self.clip_global_norm), chain.by_path(optax.chain(*parts))]
        if self.momentum is not None:
            outer.append(optax.ema(self.momentum, False, self.first_moment))
        return chain.finish(outer, self.weight_decay, self.schedule.rate(steps), weights)

    def decay(self, step: jax.Array) -> jax.Array:
        """Returns the decay of the second moment at a step, counted from 0.  Section 7.2."""
        plain = 1.0 - (step + 1.0) ** -self.decay_exponent
        return plain if self.decay_cap is None else jnp.minimum(plain, self.decay_cap)


class Moments(NamedTuple):
    """Holds the second moments of one weight; unused ones have size 1."""

    row: Array
    column: Array
    full: Array


@dataclasses.dataclass(frozen=True)
class FactoredScaling:
    """Keeps the second moments of all weights, and scales gradients by them."""

    decay: Callable[[Array], Array]
    factored_from: int
    infos: Infos

    def init(self, params: Weights) -> optax.FactoredState:
        moments = {path: self._no_moments(path, weight) for path, weight in params.items()}
        return factored_state(jnp.zeros((), jnp.int32), moments)

    def update(
        self, gradients: Weights, state: optax.FactoredState, params: Any = None
    ) -> tuple[Weights, optax.FactoredState]:
        rate = self.decay(state.count)
        updates, moments = {}, {}
        for path, gradient in gradients.items():
            old = Moments(*(tree[path] for tree in state[1:]))
            update, moments[path] = self._scaled(path, gradient, old, rate)
            # A moment of the padding that is still zero would give 0 x infinity.
            padded = self.infos[path].shape != gradient.shape
            updates[path] = jnp.where(gradient == 0, 0, update) if padded else update
        return updates, factored_state(optax.safe_increment(state.count), moments)

    def _no_moments(self, path: str, weight: Array) -> Moments:
        none, axes = jnp.zeros((1,), weight.dtype), self._factored_axes(path)
        if axes is None:
            return Moments(none, none, jnp.zeros_like(weight))
        column, row = (jax.eval_shape(lambda x, a=a: jnp.sum(x, a), weight) for a in axes)
        return Moments(jnp.zeros_like(row), jnp.zeros_like(column), none)

    def _factored_axes(self, path: str) -> tuple[int, int] | None:
        """Returns the second longest and the longest axis, or None if the second is too short."""
        true, stacked = self.infos[path].shape, self.infos[path].stacked
        order = stacked + np.argsort(true[stacked:])
        if len(order) < 2 or true[order[-2]] < self.factored_from:
            return None
        return int(order[-2]), int(order[-1])

    def _scaled(self, path: str, grad: Array, old: Moments, rate: Array) -> tuple[Array, Moments]:
        """Returns a gradient over the root of its second moment, and the new moments."""

        def mixed(old: Array, new: Array) -> Array:
            return (rate * old + (1.0 - rate) * new).astype(old.dtype)

        square, axes = jnp.square(grad), self._factored_axes(path)
        if axes is None:
            full = mixed(old.full, square + EPSILON)
            return grad * full**-0.5, old._replace(full=full)
        (second, first), true = axes, self.infos[path].shape
        row = mixed(old.row, mean(square, true[first], first) + EPSILON)
        column = mixed(old.column, mean(square, true[second], second) + EPSILON)
        along = second - (second > first)
        of_rows = mean(row, true[second], along, keepdims=True)
        row_factor = jnp.expand_dims((row / of_rows) ** -0.5, first)
        column_factor = jnp.expand_dims(column**-0.5, second)
        return grad * row_factor * column_factor, Moments(row, column, old.full)


def factored_state(count: Array, moments: dict[str, Moments]) -> optax.FactoredState:
    """Returns optax's state, with one tree of weights for each field of `Moments`."""
    places = range(len(Moments._fields))
    trees = ({path: parts[i] for path, parts in moments.items()} for i in places)
    return optax.FactoredState(count, *trees)


def clip_by_rms(max_rms: float, infos: Infos) -> optax.GradientTransformation:
    """Scales an update down to this root mean square if it is larger.  Algorithm 5."""
    return optax.stateless(
        lambda updates, _: {
            path: update / jnp.maximum(1.0, rms(update, infos[path]) / max_rms)
            for path, update in updates.items()
        }
    )


def scale_by_weight_rms(min_rms: float, infos: Infos) -> optax.GradientTransformation:
    """Scales an update by the weight's root mean square, but at least by this one.  Section 8."""
    return optax.stateless(
        lambda updates, params: {
            path: update * jnp.maximum(rms(params[path], infos[path]), min_rms)
            for path, update in updates.items()
        }
    )


def rms(x: Array, info: WeightInfo) -> Array:
    """Returns the root mean square of the unpadded entries of each stacked weight."""
    axes = tuple(range(info.stacked, x.ndim))
    count = math.prod(info.shape[info.stacked :])
    return jnp.sqrt(mean(jnp.square(x), count, axes, keepdims=True))


def mean(x: Array, count: int, axis: int | tuple[int, ...], *, keepdims: bool = False) -> Array:
    """Returns the mean of the `count` numbers that are not padding; padding is zero."""
    total = jnp.sum(x, axis, float, keepdims=keepdims)
    return (total / float(count)).astype(x.dtype)  # a count may be beyond int32
