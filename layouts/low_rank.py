"""Adds the product of two low-rank matrices to a weight."""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from configs.errors import UserError
from layouts.axes import Axis
from layouts.einsum import einsum
from layouts.padding import with_axes
from layouts.quantized import Operand
from layouts.reduction import reduced_over
from layouts.shards import spec_of

T = TypeVar("T")
ALONE = (
    "a layer uses a weight with several adapters outside a matmul with rows.  Serve the run of "
    "each adapter alone, or train adapters of other weights (Lora.targets)."
)
RANK = Axis("Z", "adapter_rank", "columns of the first matrix of an adapter")


def factor_axes(axes: str, kinds: str) -> tuple[str, str]:
    """Returns the letters of two matrices whose product is a weight with these letters.

    `kinds` has a letter for each of the weight's last axes: "i" if products sum over it, "o" if it
    is in their results, "s" if it is a stack of weights.  Axes before these are stacks.
    """
    pairs = list(zip(axes, kinds.rjust(len(axes), "s"), strict=True))
    stacked, inputs, outputs = ("".join(x for x, of in pairs if of == kind) for kind in "sio")
    return f"{stacked}{inputs}{RANK.letter}", f"{stacked}{RANK.letter}{outputs}"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Adapted(Operand):
    """Represents base + scale * a b.  A product with it is three products, none with the sum.

    Therefore the gradients of `a` and `b` need no product of the size of the base.
    """

    base: Any
    a: Array
    b: Array
    scale: float = dataclasses.field(metadata={"static": True})
    kinds: str = dataclasses.field(metadata={"static": True})
    """As in `factor_axes`."""
    reads: Array | None = None
    """With several adapters: 1 for the columns of `a` that each adapter has, else 0.  After
    `with_adapter_of_rows`: 1 for the columns that each row of a batch uses, else 0."""

    @property
    def dtype(self) -> Any:
        return jax.tree.leaves(self.base)[0].dtype

    def astype(self, dtype: DTypeLike) -> Array:
        """Returns the sum, computed in float32 at least, and sharded like the base."""
        if self.reads is not None:
            raise UserError(ALONE)
        types = self.dtype, self.a.dtype, jnp.dtype("float32")
        wide = max(types, key=lambda each: each.itemsize)
        axes, base = "ABCDEFGH"[: len(self.shape)], self.base.astype(wide)
        factors = [reduced_over(factor, ()) for factor in (self.a, self.b)]
        equation = f"{','.join(factor_axes(axes, self.kinds))}->{axes}"
        return (base + self.scale * einsum(equation, factors, spec_of(base), wide)).astype(dtype)

    def map(self, place: Callable[..., Array], axes: str, **options: bool) -> Any:
        of_a, of_b = factor_axes(axes, self.kinds)
        a, b = place(self.a, of_a, **options), place(self.b, of_b, **options)
        return dataclasses.replace(self, base=place(self.base, axes, **options), a=a, b=b)

    def product(
        self, layout: Any, equation: str, x: Array, dtype: DTypeLike | None, *, stored: bool
    ) -> Array:
        y = layout.einsum(equation, x, self.base, stored=stored, dtype=dtype)
        left, right, out = equation.replace("->", ",").split(",")
        a, b = factor_axes(right, self.kinds)
        thin = "".join(letter for letter in out if letter in a or letter not in b) + RANK.letter
        layout = with_axes(layout, *(axis for axis in layout.declared_axes if axis != RANK), RANK)
        if self.reads is not None:  # unsharded, as the columns of all adapters may not divide
            if "B" not in out or set(a) & set(out):
                raise UserError(ALONE)
            a, b, thin = (axes.replace(RANK.letter, RANK.letter.lower()) for axes in (a, b, thin))
        h = layout.einsum(f"{left},{a}->{thin}", x, self.a) * self.scale
        if self.reads is not None:
            h = layout.einsum(f"{thin},B{RANK.letter.lower()}->{thin}", h, self.reads)
        return y + layout.einsum(f"{thin},{b}->{out}", h, self.b, stored=stored, dtype=dtype)


def with_adapter_of_rows(layout: Any, weights: T, adapter_B: Array) -> T:
    """Selects one of several adapters of weights for each row of a batch; 0 selects none.

    The weights may be stacked.
    """

    def chosen(weight: Any) -> Any:
        if not isinstance(weight, Adapted) or weight.reads is None:
            return weight
        *stack, adapters, _ = weight.reads.shape
        is_read = adapter_B[:, None] == jnp.arange(1, adapters + 1)[None]  # by row and adapter
        n, place = "N" * len(stack), (*[None] * len(stack), layout.place("B")[0], None)
        operands = is_read.astype(weight.reads.dtype), weight.reads
        reads = einsum(f"BP,{n}PZ->{n}BZ", operands, jax.P(*place), None)
        return dataclasses.replace(weight, reads=reads)

    return jax.tree.map(chosen, weights, is_leaf=lambda x: isinstance(x, Adapted))


def merged(weight: T) -> T | Array:
    """Returns an adapted weight as an ordinary array, and any other weight unchanged."""
    return weight.astype(weight.dtype) if isinstance(weight, Adapted) else weight
