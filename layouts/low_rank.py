"""Adds the product of two thin matrices to the weight of a product."""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from layouts.axes import Axis
from layouts.einsum import einsum
from layouts.padding import with_axes
from layouts.quantized import Operand
from layouts.reduction import reduced_over
from layouts.shards import spec_of

Array = jax.Array
T = TypeVar("T")
RANK = Axis("Z", "adapter_rank", "columns of the first matrix of an adapter")


def factor_axes(axes: str, kinds: str) -> tuple[str, str]:
    """Returns the letters of two matrices whose product is a weight with these letters.

    `kinds` has a letter for each of its last axes: "i" where products sum over it, "o" where it is
    one of the result, "s" where it numbers weights, as axes before these do.
    """
    pairs = list(zip(axes, kinds.rjust(len(axes), "s"), strict=True))
    stacked, inputs, outputs = ("".join(x for x, of in pairs if of == kind) for kind in "sio")
    return f"{stacked}{inputs}{RANK.letter}", f"{stacked}{RANK.letter}{outputs}"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Adapted(Operand):
    """Stands for base + scale * a b.  A product with it is three products, none with that sum.

    So the gradients of `a` and `b` need no product of the size of the base.
    """

    base: Any
    a: Array
    b: Array
    scale: float = dataclasses.field(metadata={"static": True})
    kinds: str = dataclasses.field(metadata={"static": True})
    """Those of `factor_axes`."""

    @property
    def dtype(self) -> Any:
        return jax.tree.leaves(self.base)[0].dtype

    def astype(self, dtype: DTypeLike) -> Array:
        """Returns the sum, computed in float32 at least, and placed as the base."""
        types = self.dtype, self.a.dtype, jnp.dtype("float32")
        wide = max(types, key=lambda each: each.itemsize)
        axes, base = "ABCDEFGH"[: len(self.shape)], self.base.astype(wide)
        factors = [reduced_over(factor, ()) for factor in (self.a, self.b)]
        equation = f"{','.join(factor_axes(axes, self.kinds))}->{axes}"
        return (base + self.scale * einsum(equation, factors, spec_of(base), wide)).astype(dtype)

    def map(self, place: Callable[..., Array], axes: str, **options: bool) -> Any:
        of_a, of_b = factor_axes(axes, self.kinds)
        a, b = place(self.a, of_a, **options), place(self.b, of_b, **options)
        return Adapted(place(self.base, axes, **options), a, b, self.scale, self.kinds)

    def product(
        self, layout: Any, equation: str, x: Array, dtype: DTypeLike | None, *, stored: bool
    ) -> Array:
        y = layout.einsum(equation, x, self.base, stored=stored, dtype=dtype)
        left, right, out = equation.replace("->", ",").split(",")
        a, b = factor_axes(right, self.kinds)
        thin = "".join(letter for letter in out if letter in a or letter not in b) + RANK.letter
        layout = with_axes(layout, *(axis for axis in layout.declared_axes if axis != RANK), RANK)
        h = layout.einsum(f"{left},{a}->{thin}", x, self.a) * self.scale
        return y + layout.einsum(f"{thin},{b}->{out}", h, self.b, stored=stored, dtype=dtype)


def merged(weight: T) -> T | Array:
    """Returns an adapted weight as an ordinary array, and any other as it is."""
    return weight.astype(weight.dtype) if isinstance(weight, Adapted) else weight
