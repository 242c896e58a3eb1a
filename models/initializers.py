"""Draws weights: the axis letters in their names determine shapes and shardings."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from configs.errors import UserError
from layouts.axes import Axis, alphabet, leaf_path
from layouts.layout import Layout
from layouts.padding import with_axes
from models.api import WeightInfo
from models.precision import FloatType


@dataclasses.dataclass(frozen=True)
class Weights:
    """Draws stored weights.  After `stacked("N")` each gets a leading axis of that letter."""

    layout: Layout
    sizes: Mapping[str, int]
    rngs: nnx.Rngs
    dtype: FloatType
    stack: str = ""

    def stacked(self, letter: str) -> "Weights":
        return dataclasses.replace(self, stack=self.stack + letter)

    def with_axes(self, *axes: Axis) -> "Weights":
        """Returns weights for a part with these axes, whose letters take precedence over others."""
        return dataclasses.replace(self, layout=with_axes(self.layout, *axes))

    def with_sizes(self, **sizes: int) -> "Weights":
        """Returns weights with other sizes for some letters."""
        return dataclasses.replace(self, sizes={**self.sizes, **sizes})

    def normal(self, axes: str, fan_in: str) -> nnx.Param:
        """Draws normal numbers of variance 1 / (product of the sizes of the fan-in axes)."""
        stddev = math.prod(self.sizes[letter] for letter in fan_in) ** -0.5

        def sample(key: jax.Array, **place: Any) -> jax.Array:
            return stddev * jax.random.normal(key, dtype=self.dtype, **place)

        return self._param(sample, axes, fan_in)

    def ones(self, axes: str) -> nnx.Param:
        return self._param(lambda key, shape, **place: jnp.ones(shape, self.dtype), axes, "")

    def zeros(self, axes: str, reads: str = "") -> nnx.Param:
        """Returns zeros; `reads` holds the axes that the weight's product sums over, if any."""
        return self._param(lambda key, shape, **place: jnp.zeros(shape, self.dtype), axes, reads)

    def _param(self, sample: Callable[..., jax.Array], axes: str, reads: str) -> nnx.Param:
        axes = self.stack + axes
        if unknown := [letter for letter in axes if letter not in self.sizes]:
            raise UserError(
                f"weight with the axes {axes!r}: no axis {', '.join(unknown)}.  Legal: "
                f"{', '.join(self.sizes)}, and the axes that a part declares (axes = (Axis(...),))."
            )
        shape = tuple(self.sizes[letter] for letter in axes)
        drawn = self.layout.random(sample, self.rngs.params(), axes, shape, stored=True)
        by_letter = alphabet(self.layout.declared_axes).by_letter
        names, read = (tuple(by_letter[letter].name for letter in text) for text in (axes, reads))
        stored = self.layout.reshard(drawn, axes, stored=True)
        return nnx.Param(stored, info=WeightInfo(shape, names, read))


def infos_of(network: nnx.Module) -> Mapping[str, WeightInfo]:
    """Returns the description of each weight that `Weights` drew for a network, by path."""
    _, state = nnx.split(network)
    weights = jax.tree.leaves_with_path(state, is_leaf=lambda x: isinstance(x, nnx.Param))
    return {leaf_path(path): weight.get_metadata()["info"] for path, weight in weights}
