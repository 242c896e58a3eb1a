"""Convolves images whose height and width may be split: devices exchange the rows between them.

Lepikhin et al. 2020 (GShard), section 3.3.2 and appendix A.4: a device receives from its neighbours
the rows that its windows reach (the halo), as many as the device that needs the most, cuts out its
own, and masks what lies outside of the image.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from configs.errors import UserError
from layouts.axes import Axis
from layouts.shards import Entry, ppermute

Array = jax.Array
Padding = Literal["SAME", "VALID"]
KERNEL_AXES = {"Y": "O", "X": "P"}
"""The axis of a kernel that slides along each axis of an image."""
Place = Mapping[str, Entry]


class Equation(NamedTuple):
    """Holds the letters of "BYXD,OPDF->BYXF": images, kernel and result.

    As in an einsum, what is not in the result is summed over: here the kernel's axes and D.
    """

    image: str
    kernel: str
    result: str

    @classmethod
    def parse(cls, text: str) -> "Equation":
        operands, result = text.split("->")
        image, kernel = operands.split(",")
        equation = cls(image, kernel, result)
        assert len(equation.channels) == len(equation.features) == len(equation.images) == 1, text
        return equation

    def __str__(self) -> str:
        return f"{self.image},{self.kernel}->{self.result}"

    @property
    def spatial(self) -> str:
        """Returns the axes that the kernel slides along, in the kernel's order, as JAX does."""
        slides = {KERNEL_AXES[axis]: axis for axis in KERNEL_AXES if axis in self.image}
        return "".join(slides[letter] for letter in self.kernel if letter in slides)

    @property
    def images(self) -> str:
        return "".join(x for x in self.image if x not in self.kernel and x not in self.spatial)

    @property
    def channels(self) -> str:
        """Returns the axis that is summed over."""
        return "".join(x for x in self.kernel if x in self.image)

    @property
    def features(self) -> str:
        return "".join(x for x in self.kernel if x in self.result)

    def kernel_sizes(self, kernel: Sequence[int]) -> list[int]:
        """Returns the sizes of a kernel of this shape along the axes that it slides along."""
        return [kernel[self.kernel.index(KERNEL_AXES[axis])] for axis in self.spatial]

    def dimension_numbers(self) -> jax.lax.ConvDimensionNumbers:
        """Returns the positions of the axes in the order that JAX has, the spatial ones last."""
        slides = "".join(KERNEL_AXES[axis] for axis in self.spatial)
        ordered = (
            self.images + self.channels + self.spatial,
            self.features + self.channels + slides,
            self.images + self.features + self.spatial,
        )
        positions = (tuple(map(axes.index, x)) for axes, x in zip(self, ordered, strict=True))
        return jax.lax.ConvDimensionNumbers(*positions)


@dataclasses.dataclass(frozen=True)
class Window:
    """Describes where a kernel stands along one axis of an image."""

    kernel: int
    stride: int = 1
    dilation: int = 1
    padding: Padding = "SAME"

    @property
    def span(self) -> int:
        """Returns the rows from the first to the last that one place of the kernel reads."""
        return (self.kernel - 1) * self.dilation + 1

    def places(self, size: int) -> int:
        """Returns how many places a kernel has in an image of this size: the size of the result."""
        inside = size if self.padding == "SAME" else size - self.span + 1
        return -(-inside // self.stride)

    def before(self, size: int) -> int:
        """Returns the rows of zeros in front of an image of this size."""
        if self.padding == "VALID":
            return 0
        return max((self.places(size) - 1) * self.stride + self.span - size, 0) // 2


@dataclasses.dataclass(frozen=True)
class Shards:
    """Describes how one axis of an image and of the result is sharded.

    All sizes are of one device, but `size`, which is that of the image without its padding.
    """

    window: Window
    size: int
    count: int
    """Devices along the axis."""
    image_rows: int
    """Rows of the image."""
    result_rows: int
    """Rows of the result."""

    @property
    def window_rows(self) -> int:
        """Returns the rows that the windows of one device span."""
        return (self.result_rows - 1) * self.window.stride + self.window.span

    def first(self, device: int) -> int:
        """Returns the row of the whole image with which the windows of a device begin."""
        return device * self.result_rows * self.window.stride - self.window.before(self.size)

    @property
    def halo(self) -> tuple[int, int]:
        """Returns the rows before and after its shard that some device reads."""
        busy = range(-(-self.window.places(self.size) // self.result_rows))
        rows = self.image_rows
        before = (i * rows - max(self.first(i), 0) for i in busy)
        after = (min(self.first(i) + self.window_rows, self.size) - (i + 1) * rows for i in busy)
        return max(0, *before), max(0, *after)

    def offset(self, device: int) -> int:
        """Returns where the windows of a device begin, counted from its first row with the halo."""
        return self.first(device) - device * self.image_rows + self.halo[0]


@dataclasses.dataclass(frozen=True)
class Convolution:
    """Describes a convolution: its equation, the windows of its kernel, and the axes of letters."""

    equation: Equation
    windows: Sequence[Window]
    by_letter: Mapping[str, Axis]

    def shape_of_result(self, image: Sequence[int], kernel: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape of the result, from shapes without padding; raises if it has none."""
        equation, sizes = self.equation, dict(zip(self.equation.image, image, strict=True))
        sizes[equation.features] = kernel[equation.kernel.index(equation.features)]
        for axis, window in zip(equation.spatial, self.windows, strict=True):
            if window.places(sizes[axis]) < 1:
                name = self.by_letter[axis].name
                raise UserError(
                    f"convolve {equation}: a kernel that spans "
                    f"{window.span} has no place in {name} = {sizes[axis]}.  Legal: {name} of at "
                    f'least {window.span}, a smaller kernel or dilation, or padding "SAME".'
                )
            sizes[axis] = window.places(sizes[axis])
        return tuple(sizes[axis] for axis in equation.result)

    def check_divides(self, shape: Sequence[int], counts: Mapping[str, int]) -> None:
        """Raises where the result cannot be split as its axes are to be."""
        for axis, size in zip(self.equation.result, shape, strict=True):
            if size % counts[axis]:
                name, below = self.by_letter[axis].name, size // counts[axis] * counts[axis]
                legal = " or ".join(str(n) for n in (below, below + counts[axis]) if n)
                pads = f', or a rule that pads, "{name}:...+"' if self.by_letter[axis].pads else ""
                raise UserError(
                    f"convolve {self.equation}: its result has {name} = {size}, which does not "
                    f"divide over {counts[axis]} devices.  Legal: {name} {legal}{pads}."
                )

    def run(
        self, operands: Sequence[Array], sizes: Sequence[int], shape: Sequence[int], place: Place
    ) -> Array:
        """Convolves images by a kernel; `place` says by letter how the work is split.

        sizes are those of the images without their padding, and shape is that of the result with
        it.  Partial sums over split channels are added up.
        """
        equation, windows = self.equation, self.windows
        *operand_places, result_place = (
            jax.P(*(place.get(axis) for axis in axes)) for axes in equation
        )

        def of_shard(x: Array, kernel: Array) -> Array:
            padding = []
            for axis, window in zip(equation.spatial, windows, strict=True):
                at, to = equation.image.index(axis), equation.result.index(axis)
                count = jax.lax.axis_size(place[axis]) if place[axis] else 1
                shards = Shards(window, sizes[at], count, x.shape[at], shape[to] // count)
                x, pad = with_halo(x, at, place[axis], shards)
                padding.append(pad)
            sums = jax.lax.conv_general_dilated(
                x,
                kernel,
                window_strides=[window.stride for window in windows],
                padding=padding,
                rhs_dilation=[window.dilation for window in windows],
                dimension_numbers=equation.dimension_numbers(),
            )
            summed_over = place[equation.channels]
            return jax.lax.psum(sums, summed_over) if summed_over else sums

        run = jax.shard_map(of_shard, in_specs=tuple(operand_places), out_specs=result_place)
        return run(*map(jax.sharding.reshard, operands, operand_places))


def with_halo(x: Array, axis: int, entry: Entry, shards: Shards) -> tuple[Array, tuple[int, int]]:
    """Returns the rows that the windows of this device read, and what to pad them with.

    Each device is given as many rows as the one that needs the most, and cuts out its own.
    """
    if shards.image_rows * shards.count != shards.size:
        x = masked(x, axis, entry, shards)
    if entry:
        rows_before, rows_after = shards.halo
        before = rows_of_others(x, axis, entry, rows_before, is_before=True)
        after = rows_of_others(x, axis, entry, rows_after, is_before=False)
        x = jnp.concatenate([*before, x, *after], axis)
    offsets = [shards.offset(device) for device in range(shards.count)]
    low, high = -min(offsets), max(offsets) + shards.window_rows - x.shape[axis]
    if len(set(offsets)) == 1:
        return x, (low, high)
    padding = [(0, 0, 0)] * x.ndim
    padding[axis] = (max(low, 0), max(high, 0), 0)
    x = jax.lax.pad(x, jnp.zeros((), x.dtype), padding)
    step = offsets[1] - offsets[0]
    start = jax.lax.axis_index(entry) * step + offsets[0] + max(low, 0)
    return jax.lax.dynamic_slice_in_dim(x, start, shards.window_rows, axis), (0, 0)


def masked(x: Array, axis: int, entry: Entry, shards: Shards) -> Array:
    """Writes zeros behind the end of the image, where its padding is."""
    device = jax.lax.axis_index(entry) if entry else 0
    rows = jax.lax.broadcasted_iota(jnp.int32, x.shape, axis) + device * shards.image_rows
    return jnp.where(rows < shards.size, x, 0)


def rows_of_others(x: Array, axis: int, entry: Entry, rows: int, *, is_before: bool) -> list[Array]:
    """Returns the nearest rows of the devices before or after this one; zeros at the border.

    They are in order.  More rows than one device has come from several.
    """
    image_rows, count = x.shape[axis], jax.lax.axis_size(entry)
    parts = []
    for hop, taken in enumerate(range(0, rows, image_rows), 1):  # those of nearer ones before it
        size = min(image_rows, rows - taken)
        first = image_rows - size if is_before else 0
        part = jax.lax.slice_in_dim(x, first, first + size, axis=axis)
        pairs = [(device, device + hop) for device in range(count - hop)]
        parts.append(ppermute(part, entry, pairs if is_before else [p[::-1] for p in pairs]))
    return parts[::-1] if is_before else parts
