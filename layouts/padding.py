"""Pads axes that do not divide over their mesh axes to the next size that does, and masks them.

Lepikhin et al. 2020 (GShard), section 3.3.3.  A rule that ends in "+" does this: "heads:model+".
Only arrays on devices are padded: what is drawn, counted and saved has unpadded sizes.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jax import Array

from configs.errors import UserError
from layouts.axes import ROW_AXES, Axis, alphabet, letters_of
from layouts.layout import Layout
from layouts.quantized import Operand
from layouts.reduction import like_sums
from layouts.shards import num_shards


def with_padding(layout: Layout, **sizes: int) -> Layout:
    """Returns the layout for axes of these sizes, by letter; the same layout if no rule pads."""
    return _model_layout(layout).with_sizes(**sizes) if padded_axes(layout) else layout


def with_axes(layout: Layout, *axes: Axis) -> Layout:
    """Returns the layout with these declared axes, whose letters take precedence over others."""
    return dataclasses.replace(_model_layout(layout), declared_axes=axes) if axes else layout


def _model_layout(layout: Layout) -> "ModelLayout":
    if isinstance(layout, ModelLayout):
        return layout
    return ModelLayout(**{f.name: getattr(layout, f.name) for f in dataclasses.fields(layout)})


def without_padding(layout: Layout) -> Layout:
    """Returns the layout with padded axes replicated, and other axes unchanged."""
    axes = padded_axes(layout)
    return dataclasses.replace(_model_layout(layout), whole_axes=axes) if axes else layout


def padded_axes(layout: Layout) -> frozenset[str]:
    """Returns the names under which padded axes have rules, such as "heads" for kv_heads."""
    letters = filter(layout.pads, alphabet(layout.declared_axes).by_letter)
    return frozenset(rule.axis for letter in letters for rule in layout.rules_for(letter))


def pad_batch(
    layout: Layout, batch: dict[str, Array], groups: Mapping[str, int]
) -> tuple[Layout, dict[str, Array]]:
    """Pads rows, and their number, until both divide; returns a layout with the unpadded sizes.

    `groups` maps arrays to the tokens of a group: the number of groups divides as well.  An array
    may have a leading axis of microbatches.
    """
    if not isinstance(layout, ModelLayout) or not any(map(layout.pads, "BLM")):
        return layout, batch
    axes_of = {name: letters_of(name).rjust(array.ndim, "a") for name, array in batch.items()}
    sizes = dict[str, int]()
    for name, axes in axes_of.items():
        sizes |= zip(axes, layout.unpadded_shape(axes, batch[name].shape), strict=True)
    rows, shards = sizes["B"], num_shards(layout.place("G")[0])
    units = [layout.size_multiple("B"), shards]
    for name, size in groups.items():
        length = sizes[axes_of[name][-1]]
        together = math.gcd(rows * length, size) * shards
        units.append(together // math.gcd(together, length))
    unit = math.lcm(*units) if layout.pads("B") else 1

    def padded(axes: str, array: Array) -> Array:
        sizes = zip(axes, array.shape, strict=True)
        shape = tuple(-(-n // unit) * unit if letter == "B" else n for letter, n in sizes)
        return resized(array, layout.padded_shape(axes, shape), layout.place(axes))

    batch = {name: padded(axes_of[name], array) for name, array in batch.items()}
    layout, true = layout.with_sizes(B=rows), {layout.name(x): n for x, n in sizes.items()}
    if "length" in true and padded_axes(layout) & {*ROW_AXES}:
        keys = true.get("memory", true["length"])  # the row's own, if there is no source
        layout = layout.with_named(length=true["length"], memory=keys)
    return layout, batch


def of_rows(layout: Layout, axis: str, times: int = 1) -> Layout:
    """Returns the layout whose rows have `times` the size of this axis, "length" or "memory"."""
    if not isinstance(layout, ModelLayout) or axis not in (known := dict(layout.sizes)):
        return layout
    return layout.with_named(**dict.fromkeys(ROW_AXES, known[axis] * times))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelLayout(Layout):
    """Extends a layout with a model's declared axes and the sizes of axes without padding.

    Uppercase axes of a tensor are padded to sizes that divide, with zeros or values computed from
    zeros.  Lowercase axes are replicated and have their sizes without padding.
    """

    declared_axes: tuple[Axis, ...] = ()
    sizes: tuple[tuple[str, int], ...] = ()
    """Sizes of axes without padding, by name."""
    whole_axes: frozenset[str] = frozenset()

    def pads(self, letter: str) -> bool:
        return not self.whole_axes and super().pads(letter)

    def with_sizes(self, **sizes: int) -> "ModelLayout":
        names = {self.name(letter): size for letter, size in sizes.items() if self.pads(letter)}
        return self.with_named(**{x: n for x, n in names.items() if x not in ROW_AXES})

    def with_named(self, **sizes: int) -> "ModelLayout":
        """Returns the layout with these sizes of axes without padding, by name."""
        return dataclasses.replace(self, sizes=tuple(sorted((dict(self.sizes) | sizes).items())))

    def name(self, letter: str) -> str:
        axis = alphabet(self.declared_axes).by_letter.get(letter.upper())
        return letter if axis is None else axis.name

    def size_multiple(self, letter: str) -> int:
        """Returns the number that divides the padded size of an axis, on the current mesh."""
        if not self.pads(letter):
            return 1
        letters = itertools.product(self.padded_with(letter), (False, True))
        places = (self.place(each, stored=stored) for each, stored in letters)
        return math.lcm(*(num_shards(place[0]) for place in places))

    def unpadded_shape(self, axes: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        known = dict(self.sizes)
        sizes = zip(axes, shape, strict=True)
        return tuple(min(size, known.get(self.name(letter), size)) for letter, size in sizes)

    def padded_shape(self, axes: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        units = map(self.size_multiple, axes)
        return tuple(-(-size // unit) * unit for size, unit in zip(shape, units, strict=True))

    def reshard(self, x: Array, axes: str, *, stored: bool = False) -> Array:
        if isinstance(x, Operand):
            return x.map(self.reshard, axes, stored=stored)
        place = like_sums(x, self.place(axes, stored=stored))
        unpadded = self._without_padding(axes, x.shape, "".join(filter(str.islower, axes)))
        return resized(x, self.padded_shape(axes, unpadded), place)

    def _without_padding(self, axes: str, shape: tuple[int, ...], without: str) -> tuple[int, ...]:
        """Returns a shape with some axes unpadded; declared axes must have a known size."""
        known = {name for name, _ in self.sizes}
        for letter in without.upper():
            axis = next((axis for axis in self.declared_axes if axis.letter == letter), None)
            if axis and axis.name not in known and self.size_multiple(letter) > 1:
                raise UserError(
                    f"The rule of axis {axis.name!r} pads it, but its layout knows no size of it.  "
                    f"In `build`: with_padding(with_axes(layout, ...), {letter}=size)."
                )
        sizes = zip(axes, shape, self.unpadded_shape(axes, shape), strict=True)
        return tuple(true if axis in without else size for axis, size, true in sizes)

    def random(
        self,
        sample: Callable[..., Array],
        key: Array,
        axes: str,
        shape: tuple[int, ...],
        *,
        stored: bool = False,
    ) -> Array:
        """Draws random numbers, with zeros in the padding, which `shape` includes unless `stored`.

        Padding along the first axis does not change the bits before it, so only other padded axes
        are drawn without padding, unsharded.
        """
        true, padded = self.unpadded_shape(axes, shape), shape
        if stored:
            true, padded = shape, self.padded_shape(axes, shape)
        place, drawn_shape = self.place(axes, stored=stored), (*padded[:1], *true[1:])
        sizes = zip(place, drawn_shape, padded, strict=True)
        entries = tuple(entry if drawn == size else None for entry, drawn, size in sizes)
        drawn = sample(key, shape=drawn_shape, out_sharding=jax.P(*entries))
        return filled(resized(drawn, padded, place), true, place, 0)

    def mask_padding(self, x: Array, axes: str, letter: str, fill: float) -> Array:
        shape = self._without_padding(axes, x.shape, letter)
        return filled(x, shape, self.place(axes), fill)


def resized(x: Array, shape: tuple[int, ...], place: jax.P) -> Array:
    """Pads x with zeros, or cuts it, along the axes whose sizes differ; then reshards it."""
    if x.shape == shape:
        return jax.sharding.reshard(x, place)
    sizes = zip(x.shape, shape, place.partitions, strict=True)
    gathered = place.update(partitions=[entry if old == new else None for old, new, entry in sizes])
    widths = [(0, new - old, 0) for old, new in zip(x.shape, shape, strict=True)]
    x = jax.lax.pad(jax.sharding.reshard(x, gathered), jnp.zeros((), x.dtype), widths)
    return jax.sharding.reshard(x, place)


def filled(x: Array, true: tuple[int, ...], place: jax.P, fill: float) -> Array:
    """Writes `fill` beyond the unpadded shape of x."""
    inside = [
        jax.lax.broadcasted_iota(jnp.int32, x.shape, axis, out_sharding=place) < size
        for axis, size in enumerate(true)
        if size != x.shape[axis]
    ]
    return jnp.where(functools.reduce(jnp.logical_and, inside), x, fill) if inside else x
