"""Computes convolutions and pooling over images whose height, width or depth may be sharded.

Lepikhin et al. 2020 (GShard), section 3.3.2 and appendix A.4: each device receives from its
neighbours the rows that its windows reach (the halo).  All devices receive as many rows as the one
that needs the most; each cuts out the rows that it needs, and masks rows outside the image.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from configs.errors import UserError
from layouts.axes import Axis
from layouts.shards import Entry, ppermute

Padding = Literal["SAME", "VALID"] | tuple[int, int]
Place = Mapping[str, Entry]


class Equation(NamedTuple):
    """Holds the letters of an equation such as "BYXD,OPDF->BYXF": images, kernel and result.

    As in an einsum, axes that are not in the result are summed over: here O, P and D.  An axis in
    all three terms has one convolution per index: "BYXD,OPD->BYXD" has one per channel.
    """

    image: str
    kernel: str
    result: str
    spatial: str
    """The image axes that the kernel slides along, in the kernel's order, as in JAX."""
    sliding: str
    """The kernel axes that slide along them, in the same order."""

    @classmethod
    def parse(cls, text: str, by_letter: Mapping[str, Axis]) -> "Equation":
        """Parses an equation; raises ValueError if it is not a convolution."""
        operands, _, result = text.partition("->")
        image, _, kernel = operands.partition(",")
        slides = {x: by_letter[x].slides for x in kernel if x in by_letter and by_letter[x].slides}
        slides = {x: axis for x, axis in slides.items() if axis in image and x not in result}
        equation = cls(image, kernel, result, "".join(slides.values()), "".join(slides))
        summed_over = {*image, *kernel} - {*result}
        if (
            len(equation.images) != 1
            or max(len(equation.channels), len(equation.features)) > 1
            or summed_over != {*equation.channels, *equation.sliding}
            or not {*result} <= {*image, *kernel}
        ):
            raise ValueError(
                f"convolve {text!r}: legal are equations such as 'BYXD,OPDF->BYXF', with one axis "
                "of images, and at most one of channels and one of features."
            )
        return equation

    def __str__(self) -> str:
        return f"{self.image},{self.kernel}->{self.result}"

    @property
    def images(self) -> str:
        return "".join(x for x in self.image if x not in self.kernel and x not in self.spatial)

    @property
    def groups(self) -> str:
        return "".join(x for x in self.image if x in self.kernel and x in self.result)

    @property
    def channels(self) -> str:
        """Returns the image and kernel axis that is summed over, if any."""
        return "".join(x for x in self.image if x in self.kernel and x not in self.result)

    @property
    def features(self) -> str:
        return "".join(x for x in self.kernel if x in self.result and x not in self.image)

    def windows(
        self, kernel: Sequence[int], given: Sequence[Sequence[int] | None], padding: Any
    ) -> list["Window"]:
        """Returns one window per spatial axis, in order, for a kernel of this shape.

        `given` holds strides, dilations and base dilations; None stands for 1 along every axis.
        """
        sizes = [kernel[self.kernel.index(axis)] for axis in self.sliding]
        by_axis: list[Any] = [padding] * len(sizes) if isinstance(padding, str) else [*padding]
        paddings = [tuple(each) if isinstance(each, list) else each for each in by_axis]
        numbers = [[1] * len(sizes) if x is None else x for x in given]
        if {len(sizes)} != {*map(len, (*numbers, paddings))}:
            raise ValueError(
                f"convolve {self}: legal are {len(sizes)} strides, dilations and paddings, for "
                f"{', '.join(self.sliding)}."
            )
        return [Window(*each) for each in zip(sizes, *numbers, paddings, strict=True)]

    def convolve(self, x: Array, kernel: Array, windows: Sequence["Window"]) -> Array:
        """Convolves unsharded images with a kernel, each group separately."""
        if self.groups:
            axes = [letters.index(self.groups[0]) for letters in self[:3]]
            rest = (letters.replace(self.groups[0], "") for letters in self[:3])
            inner = self._replace(**dict(zip(self._fields, rest, strict=False)))
            of_group = jax.vmap(inner.convolve, in_axes=(*axes[:2], None), out_axes=axes[2])
            return of_group(x, kernel, windows)
        image, weights, result = self[:3]
        if not self.channels:
            x, kernel, image, weights = x[..., None], kernel[..., None], f"{image}c", f"{weights}c"
        if not self.features:
            kernel, weights, result = kernel[..., None], f"{weights}f", f"{result}f"
        channel, feature = self.channels or "c", self.features or "f"
        ordered = (
            self.images + channel + self.spatial,
            feature + channel + self.sliding,
            self.images + feature + self.spatial,
        )
        terms = zip((image, weights, result), ordered, strict=True)
        positions = (tuple(map(letters.index, order)) for letters, order in terms)
        rows = [x.shape[image.index(axis)] for axis in self.spatial]
        extra = [each.extra_places(size) for each, size in zip(windows, rows, strict=True)]
        pads = [each.pads(0) for each in windows]
        y = jax.lax.conv_general_dilated(
            x,
            kernel,
            window_strides=[each.stride for each in windows],
            padding=[
                (before, after + count * each.stride)
                for (before, after), count, each in zip(pads, extra, windows, strict=True)
            ],
            lhs_dilation=[each.base_dilation for each in windows],
            rhs_dilation=[each.dilation for each in windows],
            dimension_numbers=jax.lax.ConvDimensionNumbers(*positions),
        )
        for axis, count in zip(self.spatial, extra, strict=True):
            y = jax.lax.slice_in_dim(y, 0, -count or None, axis=result.index(axis))
        return y if self.features else y[..., 0]


@dataclasses.dataclass(frozen=True)
class Window:
    """Describes how a kernel slides along one axis of an image."""

    kernel: int
    stride: int = 1
    dilation: int = 1
    """Distance between successive rows of the kernel."""
    base_dilation: int = 1
    """Distance between successive rows of the image, with zeros inserted between them."""
    padding: Padding = "SAME"

    def __post_init__(self) -> None:
        numbers = (self.kernel, self.stride, self.dilation, self.base_dilation)
        if not all(isinstance(number, int) and number > 0 for number in numbers):
            raise ValueError(f"{self}: legal are whole numbers of at least 1.")
        pair = self.padding if isinstance(self.padding, tuple) else ()
        if self.padding not in ("SAME", "VALID") and [*map(type, pair)] != [int, int]:
            raise ValueError(f"{self}: legal padding is 'SAME', 'VALID' or two whole numbers.")

    @property
    def span(self) -> int:
        """Returns how many rows the dilated kernel covers."""
        return (self.kernel - 1) * self.dilation + 1

    def dilated(self, size: int) -> int:
        """Returns the number of rows after base dilation inserts zeros into this many rows."""
        return (size - 1) * self.base_dilation + 1

    def pads(self, size: int) -> tuple[int, int]:
        """Returns the rows of padding before and after an image of this size."""
        if isinstance(self.padding, tuple):
            return self.padding
        if self.padding == "VALID":
            return 0, 0
        count = -(-size * self.base_dilation // self.stride)
        rows = max((count - 1) * self.stride + self.span - self.dilated(size), 0)
        # As in `jax.lax.conv_general_dilated` and `jax.lax.conv_transpose`.
        before = rows // 2 if self.base_dilation == 1 else min(-(-rows // 2), self.span - 1)
        return before, rows - before

    def places(self, size: int) -> int:
        """Returns how many windows an image of this size has: the size of the result."""
        return (self.dilated(size) + sum(self.pads(size)) - self.span) // self.stride + 1

    def extra_places(self, size: int) -> int:
        """Returns how many extra windows to compute and drop, so that XLA compiles the convolution.

        XLA's algebraic simplifier aborts if there is no padding, the base dilation is the size of
        the kernel and the stride is one less.  The gradient swaps the two (jax 0.10 and 0.12).
        """
        before, after = self.pads(size)
        last_begins = (self.places(size) - 1) * self.stride - before
        pair = self.kernel - 1, self.kernel
        ends = self.kernel - 1, self.dilated(size) - 1
        forward = (self.stride, self.base_dilation) == pair and (before, after) == (0, 0)
        backward = (self.base_dilation, self.stride) == pair and (before, last_begins) == ends
        return int(self.dilation == 1 and (forward or backward))


@dataclasses.dataclass(frozen=True)
class Shards:
    """Describes how one axis of an image and of the result is sharded.

    All sizes are per device, except `size`: the global size of the image, without padding.
    """

    window: Window
    size: int
    count: int
    """Devices along the axis."""
    image_rows: int
    """Rows of the image on one device."""
    result_rows: int
    """Rows of the result on one device."""

    @property
    def window_rows(self) -> int:
        """Returns how many rows of the dilated image the windows of one device span."""
        return (self.result_rows - 1) * self.window.stride + self.window.span

    def first(self, device: int) -> int:
        """Returns the row of the dilated image where the windows of a device begin."""
        return device * self.result_rows * self.window.stride - self.window.pads(self.size)[0]

    @property
    def halo(self) -> tuple[int, int]:
        """Returns the most rows that any device reads before and after its shard."""
        busy = range(-(-self.window.places(self.size) // self.result_rows))
        rows, dilation = self.image_rows, self.window.base_dilation
        firsts = [-(-self.first(i) // dilation) for i in busy]
        ends = [(self.first(i) + self.window_rows - 1) // dilation + 1 for i in busy]
        before = (i * rows - max(first, 0) for i, first in enumerate(firsts))
        after = (min(end, self.size) - (i + 1) * rows for i, end in enumerate(ends))
        return max(0, *before), max(0, *after)

    def offset(self, device: int) -> int:
        """Returns where the windows of a device begin within its dilated shard and halo."""
        first_row = device * self.image_rows - self.halo[0]
        return self.first(device) - first_row * self.window.base_dilation


@dataclasses.dataclass(frozen=True)
class Work:
    """Describes an operation that slides windows over its first operand."""

    name: str
    """Its name in error messages, such as "convolve BYXD,OPDF->BYXF"."""
    operands: tuple[str, ...]
    """The letters of the operands, images first."""
    result: str
    summed_over: str
    """The letter of the channel axis that is summed over, if any."""
    windows: Mapping[str, Window]
    """Windows by the letter of the image axis that they slide along."""
    fill: float
    """The value outside the images."""
    compute: Callable[..., Array]
    """Computes one device's result from its operands and windows, with padding as two numbers."""
    by_letter: Mapping[str, Axis]

    def sizes_of_result(
        self, sizes: Mapping[str, int], shapes: Sequence[tuple[int, ...]]
    ) -> dict[str, int]:
        """Returns the sizes of the result's axes; raises UserError if a window does not fit.

        `sizes` are the sizes of the images.  Both exclude the padding that makes axes divide.
        """
        for axis, window in self.windows.items():
            if window.places(sizes[axis]) < 1:
                name = self.by_letter[axis].name
                raise UserError(
                    f"{self.name}: a kernel that spans {window.span} does not fit in {name} = "
                    f"{sizes[axis]}.  Legal: {name} of at least {window.span}, a smaller kernel or "
                    'dilation, or padding "SAME".'
                )
        slid = {axis: window.places(sizes[axis]) for axis, window in self.windows.items()}
        pairs = zip(self.operands, shapes, strict=True)
        others = {axis: size for pair in pairs for axis, size in zip(*pair, strict=True)}
        return {axis: {**others, **sizes, **slid}[axis] for axis in self.result}

    def check_divides(self, sizes: Mapping[str, int], counts: Mapping[str, int]) -> None:
        """Raises UserError if the sizes of the result do not divide over the devices."""
        for axis, size in sizes.items():
            if size % counts[axis]:
                name, below = self.by_letter[axis].name, size // counts[axis] * counts[axis]
                legal = " or ".join(str(n) for n in (below, below + counts[axis]) if n)
                pads = f', or a rule that pads, "{name}:...+"' if self.by_letter[axis].pads else ""
                raise UserError(
                    f"{self.name}: its result has {name} = {size}, which does not divide over "
                    f"{counts[axis]} devices.  Legal: {name} {legal}{pads}."
                )

    def run(
        self, operands: Sequence[Array], sizes: Mapping[str, int], results: Mapping[str, int],
        place: Place,
    ) -> Array:  # fmt: skip
        """Computes on all devices; `place` maps letters to the mesh axes that split them.

        `sizes` are the sizes of the images without padding, `results` those of the result with
        padding.  Partial sums over split channels are added up.
        """
        *operand_places, result_place = (
            jax.P(*(place.get(axis) for axis in axes)) for axes in (*self.operands, self.result)
        )

        def of_shard(x: Array, *others: Array) -> Array:
            local = []
            for letter, window in self.windows.items():
                axis, entry = self.operands[0].index(letter), place[letter]
                count = jax.lax.axis_size(entry) if entry else 1
                rows = x.shape[axis], results[letter] // count
                shards = Shards(window, sizes[letter], count, *rows)
                x, padding, base = with_halo(x, axis, entry, shards, self.fill)
                local.append(dataclasses.replace(window, padding=padding, base_dilation=base))
            y, summed_over = self.compute(x, *others, local), place.get(self.summed_over)
            return jax.lax.psum(y, summed_over) if summed_over else y

        run = jax.shard_map(of_shard, in_specs=tuple(operand_places), out_specs=result_place)
        return run(*map(jax.sharding.reshard, operands, operand_places))


def pooling(
    axes: str, windows: Mapping[str, Window], kind: Literal["max", "sum"],
    by_letter: Mapping[str, Axis],
) -> Work:  # fmt: skip
    """Returns the work that reduces each window to its maximum or its sum."""
    if not windows or not {*windows} <= {*axes}:
        raise ValueError(f"pool {axes!r}: windows along {[*windows]}.  Legal: some of {[*axes]}.")
    if kind not in ("max", "sum"):
        raise ValueError(f"pool {axes!r}: kind {kind!r}.  Legal: 'max' or 'sum'.")
    fill, combine = (-jnp.inf, jax.lax.max) if kind == "max" else (0, jax.lax.add)

    def compute(x: Array, local: Sequence[Window]) -> Array:
        sizes, strides = [1] * x.ndim, [1] * x.ndim
        for letter, window in zip(windows, local, strict=True):
            axis = axes.index(letter)
            sizes[axis], strides[axis] = window.kernel, window.stride
            x = pad(x, axis, (*window.pads(0), 0), fill)
        # Sums of many numbers are large.
        wide = x.astype(jnp.float32) if jnp.finfo(x.dtype).bits < 32 else x
        init = np.array(fill, wide.dtype)
        y = jax.lax.reduce_window(wide, init, combine, sizes, strides, "VALID")
        return y.astype(x.dtype)

    return Work(f"pool {axes}", (axes,), axes, "", windows, fill, compute, by_letter)


def with_halo(
    x: Array, axis: int, entry: Entry, shards: Shards, fill: float
) -> tuple[Array, tuple[int, int], int]:
    """Returns the rows that this device's windows read, their padding and their base dilation.

    Each device receives as many rows as the one that needs the most, and cuts out what it needs.
    """
    rows_before, rows_after = shards.halo
    if entry:
        before = rows_of_others(x, axis, entry, rows_before, is_before=True)
        after = rows_of_others(x, axis, entry, rows_after, is_before=False)
        x = jnp.concatenate([*before, x, *after], axis)
    device = jax.lax.axis_index(entry) if entry else 0
    if shards.image_rows * shards.count != shards.size or (entry and fill):
        row = jax.lax.broadcasted_iota(jnp.int32, x.shape, axis)
        row += device * shards.image_rows - rows_before
        x = jnp.where((row >= 0) & (row < shards.size), x, jnp.asarray(fill, x.dtype))
    offsets = [shards.offset(device) for device in range(shards.count)]
    window_rows, dilation, rows = shards.window_rows, shards.window.base_dilation, x.shape[axis]
    # XLA's gradients are wrong for other paddings (CPUs, jax 0.10).
    if len({*offsets}) == 1 and 0 <= -offsets[0] < shards.window.span:
        end = offsets[0] + window_rows
        return x, (-offsets[0], end - shards.window.dilated(rows)), dilation
    # Windows may begin at different offsets between rows, or a device may read only zeros.
    if len({offset % dilation for offset in offsets}) > 1 or window_rows < dilation:
        x, rows, dilation = pad(x, axis, (0, 0, dilation - 1), 0), shards.window.dilated(rows), 1
    starts = [-(-offset // dilation) for offset in offsets]
    skipped = starts[0] * dilation - offsets[0]
    taken = (window_rows - skipped - 1) // dilation + 1
    low, high = max(-min(starts), 0), max(max(starts) + taken - rows, 0)
    start = device * (starts[:2][-1] - starts[0]) + starts[0] + low
    x = jax.lax.dynamic_slice_in_dim(pad(x, axis, (low, high, 0), fill), start, taken, axis)
    return x, (skipped, window_rows - skipped - ((taken - 1) * dilation + 1)), dilation


def pad(x: Array, axis: int, widths: tuple[int, int, int], fill: float) -> Array:
    """Pads one axis before, after and between its rows."""
    config = [(0, 0, 0)] * x.ndim
    config[axis] = widths
    return jax.lax.pad(x, jnp.asarray(fill, x.dtype), config)


def rows_of_others(x: Array, axis: int, entry: Entry, rows: int, *, is_before: bool) -> list[Array]:
    """Returns the nearest rows of devices before or after this one, in order; zeros at the border.

    If one device has too few rows, they come from several devices.
    """
    image_rows, count = x.shape[axis], jax.lax.axis_size(entry)
    parts = []
    for hop, taken in enumerate(range(0, rows, image_rows), 1):  # `taken`: from nearer devices
        size = min(image_rows, rows - taken)
        first = image_rows - size if is_before else 0
        part = jax.lax.slice_in_dim(x, first, first + size, axis=axis)
        pairs = [(device, device + hop) for device in range(count - hop)]
        parts.append(ppermute(part, entry, pairs if is_before else [p[::-1] for p in pairs]))
    return parts[::-1] if is_before else parts
