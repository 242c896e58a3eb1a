"""Rounds the operands of products to 8 bits: weights once, or both operands in each product.

Numbers that a product sums over share a scale, so the scale can multiply the result instead.
"""

import abc
import dataclasses
import functools
from collections.abc import Callable, Collection
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from layouts.einsum import einsum, platform
from layouts.reduction import free_axes, reduced_over, scaled
from layouts.shards import mesh_axes, spec_of

Rounding = Literal["int8", "fp8"]
TYPES = {"int8": jnp.int8, "fp8": jnp.float8_e4m3fn}
LARGEST = {"int8": 127, "fp8": 448}
SMALLEST = 1e-30
"""Rows without larger numbers become zeros: the factor that scales them up could be infinite."""


class Operand(abc.ABC):
    """Represents the second operand of a product, as a tree of arrays."""

    def __getitem__(self, index: Any) -> Any:
        return jax.tree.map(lambda array: array[index], self)

    @property
    def shape(self) -> tuple[int, ...]:
        return jax.tree.leaves(self)[0].shape

    @abc.abstractmethod
    def astype(self, dtype: DTypeLike) -> Array:
        """Returns an ordinary array."""

    def map(self, place: Callable[..., Array], axes: str, **options: bool) -> Any:
        """Maps `place` over its arrays and their letters; `axes` are those of the operand."""
        return jax.tree.map(lambda array: place(array, axes, **options), self)

    @abc.abstractmethod
    def product(
        self, layout: Any, equation: str, x: Array, dtype: DTypeLike | None, *, stored: bool
    ) -> Array:
        """Computes the einsum of an array and this operand; the layout shards the result."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Quantized(Operand):
    """Holds 8-bit numbers, and their scale, which has size 1 along the axes that share it."""

    values: Array
    scale: Array

    @property
    def dtype(self) -> jnp.dtype:
        """Returns the type of the dequantized numbers."""
        return self.scale.dtype

    def astype(self, dtype: DTypeLike) -> Array:
        return (self.values.astype(self.dtype) * self.scale).astype(dtype)

    def scale_axes(self, axes: str) -> str:
        """Returns the axes of the scale, with "1" for those that share it."""
        sizes = zip(axes, self.scale.shape, strict=True)
        return "".join("1" if size == 1 else letter for letter, size in sizes)

    def map(self, place: Callable[..., Array], axes: str, **options: bool) -> Any:
        scale = place(self.scale, self.scale_axes(axes), **options)
        return Quantized(place(self.values, axes, **options), scale)

    def scaled(self, layout: Any, stored_axes: str, y: Array, axes: str) -> Array:
        """Multiplies y by the scale; y must have all axes of the scale."""
        scale_axes = self.scale_axes(stored_axes)
        shared = [i for i, letter in enumerate(scale_axes) if letter == "1"]
        kept = scale_axes.replace("1", "")
        ordered = "".join(letter for letter in axes if letter in kept)
        scale = layout.einsum(f"{kept}->{ordered}", self.scale.squeeze(shared))
        return scaled(y.astype(self.dtype), layout.broadcast_like(scale, ordered, axes))

    def product(
        self, layout: Any, equation: str, x: Array, dtype: DTypeLike | None, *, stored: bool
    ) -> Array:
        left, right, out = equation.replace("->", ",").split(",")
        of_scale = set(self.scale_axes(right)) - {"1"}
        result_type = dtype or x.dtype
        # A sum of whole numbers may be too large for float16.
        sum_type = jnp.float32 if result_type == jnp.float16 else dtype
        values, scales_result = self.values, of_scale <= set(out)
        if not scales_result and of_scale <= set(left):
            x = self.scaled(layout, right, x, left).astype(x.dtype)
        elif not scales_result:
            values = self.astype(x.dtype)
        y = layout.einsum(equation, x, values.astype(x.dtype), stored=stored, dtype=sum_type)
        y = self.scaled(layout, right, y, out) if scales_result else y
        return y.astype(result_type)


def quantize(array: Array, summed: Collection[int], rounding: Rounding = "int8") -> Quantized:
    """Rounds an array to 8 bits, with one scale for all entries along the summed axes."""
    wide = array.astype(float)
    top = jnp.max(jnp.abs(wide), axis=tuple(summed), keepdims=True)
    top = jnp.where(top < SMALLEST, 1, top)
    values = wide * (LARGEST[rounding] / top)
    values = jnp.round(values) if rounding == "int8" else values
    return Quantized(values.astype(TYPES[rounding]), top / LARGEST[rounding])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RoundedInProducts(Operand):
    """Holds an ordinary weight; each product rounds the weight and the other operand."""

    array: Array
    rounding: Rounding = dataclasses.field(metadata={"static": True})

    def astype(self, dtype: DTypeLike) -> Array:
        return self.array.astype(dtype)

    def product(
        self, layout: Any, equation: str, x: Array, dtype: DTypeLike | None, *, stored: bool
    ) -> Array:
        assert dtype is None and not stored, equation
        return rounded_product(layout, equation, self.rounding, x, self.array)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def rounded_product(layout: Any, equation: str, kind: Rounding, x: Array, weight: Array) -> Array:
    """Multiplies operands rounded to 8 bits; the gradients ignore the rounding."""
    *terms, out = equation.replace("->", ",").split(",")
    pairs = [
        (quantize(each, [i for i, letter in enumerate(axes) if letter not in out], kind), axes)
        for each, axes in zip((x, reduced_over(weight, ())), terms, strict=True)
    ]
    # CPUs have no fast 8-bit products; float32 represents products of two numbers exactly.
    is_cpu = platform() == "cpu"
    operands = [each.values.astype(float) if is_cpu else each.values for each, _ in pairs]
    sum_type = jnp.int32 if kind == "int8" and not is_cpu else float
    # Devices add up partial sums after scaling, in the same narrow type as in other products.
    place = layout.place(out)
    split = set.intersection(*(splits(each.values, axes) for each, axes in pairs))
    summed = free_axes(place, [name for letter, name in split if letter not in out])
    y = einsum(equation, operands, place.update(unreduced=summed), sum_type)
    for each, axes in pairs:
        y = each.scaled(layout, axes, y, out)
    return jax.sharding.reshard(y.astype(x.dtype), place)


def splits(x: Array, axes: str) -> set[tuple[str, str]]:
    """Returns the letters of an array that are split, each with a mesh axis."""
    entries = zip(axes, spec_of(x).partitions, strict=True)
    return {(letter, name) for letter, entry in entries for name in mesh_axes(entry)}


def _gradients(
    layout: Any, equation: str, rounding: Rounding, operands: tuple[Array, Array], dy: Array
) -> tuple[Array, Array]:
    x, weight = operands
    [dx] = jax.linear_transpose(lambda x: layout.einsum(equation, x, weight), x)(dy)
    [dweight] = jax.linear_transpose(lambda weight: layout.einsum(equation, x, weight), weight)(dy)
    return dx, dweight


rounded_product.defvjp(lambda *arguments: (rounded_product(*arguments), arguments[3:]), _gradients)
