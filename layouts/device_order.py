"""Orders devices: places each mesh axis along axes of the TPU torus.

"data:y;model:x;model:core" places the mesh axis model along x and over both cores of each chip.  A
number selects a factor of an axis: "data:x4;model:x8" divides a row of 32 chips into 4 groups of 8
neighbors, because later names vary faster.
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from configs.errors import UserError, did_you_mean
from layouts.layout import parts

CHIP_AXES = ("x", "y", "z")
CORE = "core"  # the axis inside a chip
SHOWN = 3  # legal orders in an error
Torus = Mapping[str, int]  # chips along each axis, then cores of a chip


class Piece(NamedTuple):
    """Assigns a factor of an axis of the torus to a mesh axis."""

    mesh_axis: str
    torus_axis: str
    size: int | None  # None: all that other pieces leave


def parse(order: str) -> list[Piece]:
    """Parses an order."""
    pieces = []
    for part in parts(order):
        match = re.fullmatch(r"(\w+):([a-z]+)(\d*)", part)
        if match is None:
            raise ValueError(f"{part!r} is not mesh_axis:torus_axis, as in 'model:x', 'model:x8'.")
        pieces.append(Piece(match[1], match[2], int(match[3]) if match[3] else None))
    return pieces


def torus_of(devices: Sequence[Any]) -> dict[str, int] | None:
    """Returns the box that these devices fill; None if they are not on a torus, such as GPUs."""
    if not all(hasattr(device, "core_on_chip") for device in devices):  # GPUs have coords too
        return None
    places = np.array([coordinates(device) for device in devices])
    extents = np.ptp(places, axis=0) + 1
    return dict(zip((*CHIP_AXES[: places.shape[1] - 1], CORE), extents.tolist(), strict=True))


def coordinates(device: Any) -> tuple[int, ...]:
    """Returns the coordinates of a device on the torus, the core last."""
    return (*device.coords, device.core_on_chip)


def check_order(order: str, mesh: Mapping[str, int], torus: Torus | None) -> None:
    """Raises UserError with everything that is wrong with an order."""
    if wrong := order_problems(order, mesh, torus):
        raise UserError(
            f"Layout.order = {order!r}: {'  '.join(wrong)}  {describe_legal_orders(mesh, torus)}"
        )


def order_problems(order: str, mesh: Mapping[str, int], torus: Torus | None) -> list[str]:
    """Returns what is wrong with an order; without a torus, what is wrong on every torus."""
    try:
        pieces = parse(order)
    except ValueError as error:
        return [str(error)]
    axes = torus or dict.fromkeys((*CHIP_AXES, CORE))
    wrong = []
    for name, known in (("mesh_axis", mesh), ("torus_axis", axes)):
        for axis in dict.fromkeys(getattr(piece, name) for piece in pieces):
            if axis not in known:
                near, what = did_you_mean(axis, known), name.replace("_", " ")
                wrong.append(f"no such {what}: {axis}.{near}  Legal: {', '.join(known)}.")
    return wrong or ([] if torus is None else wrong_sizes(pieces, mesh, torus))


def wrong_sizes(pieces: Sequence[Piece], mesh: Mapping[str, int], torus: Torus) -> list[str]:
    """Describes axes that are taken more than once, or whose pieces multiply to another size."""
    sized, wrong = with_sizes(pieces, torus), []
    for torus_axis, extent in torus.items():
        along = [piece for piece in sized if piece.torus_axis == torus_axis]
        if sum(piece.size is None for piece in pieces if piece.torus_axis == torus_axis) > 1:
            wrong.append(f"{torus_axis} is used whole more than once.")
        elif (product := math.prod(piece.size or 0 for piece in along)) != extent:
            text = order_text(along, torus)
            taken = f"{text} takes {product}" if along else "nothing is placed along it"
            wrong.append(f"{torus_axis} has {extent}, and {taken}.")
    for mesh_axis, size in mesh.items():
        along = [piece for piece in sized if piece.mesh_axis == mesh_axis]
        if not wrong and (product := math.prod(piece.size or 0 for piece in along)) != size:
            text = order_text(along, torus)
            taken = f"{text} gives it {product}" if along else "nothing names it"
            wrong.append(f"{mesh_axis} = {size}, and {taken}.")
    return wrong


def with_sizes(pieces: Sequence[Piece], torus: Torus) -> list[Piece]:
    """Fills in the sizes of pieces that take all that other pieces leave."""

    def left(torus_axis: str) -> int:
        others = (p.size for p in pieces if p.torus_axis == torus_axis and p.size is not None)
        return torus[torus_axis] // max(1, math.prod(others))

    return [p if p.size is not None else p._replace(size=left(p.torus_axis)) for p in pieces]


def order_text(pieces: Sequence[Piece], torus: Torus) -> str:
    """Formats an order as in a layout file."""
    texts = (f"{name}:{axis}{'' if size == torus[axis] else size}" for name, axis, size in pieces)
    return ";".join(texts) or "nothing"


def describe_legal_orders(mesh: Mapping[str, int], torus: Torus | None) -> str:
    """Describes the legal orders."""
    if torus is None:
        return "Legal: a mesh axis, a colon and x, y, z or core, as in 'data:y;model:x;model:core'."
    shown = list(itertools.islice(orders(mesh, torus), SHOWN))
    if not shown:
        return "Legal: none, which is JAX's order; a mesh of all devices has others."
    return f"Legal: {', '.join(map(repr, shown))} and others, or none: JAX's order."


def device_permutation(order: str, mesh: Mapping[str, int], torus: Torus) -> np.ndarray:
    """Returns the row-major indices of the torus's devices, in the shape of the mesh."""
    pieces = with_sizes(parse(order), torus)
    by_torus = sorted(pieces, key=lambda piece: [*torus].index(piece.torus_axis))
    by_mesh = sorted(range(len(pieces)), key=lambda i: [*mesh].index(by_torus[i].mesh_axis))
    # `sorted` is stable: a piece that is named later varies faster in the torus and in the mesh.
    numbers = np.arange(math.prod(torus.values())).reshape([piece.size or 0 for piece in by_torus])
    return numbers.transpose(by_mesh).reshape(tuple(mesh.values()))


def orders(mesh: Mapping[str, int], torus: Torus) -> Iterator[str]:
    """Yields orders that differ in cost, orders with fewer pieces first.

    Each mesh axis may take a factor of each axis of the torus, as neighbours or with a stride.
    Equal axes of the torus are tried once.
    """
    sizes = {name: size for name, size in mesh.items() if size > 1}
    nests = list(itertools.permutations(sizes)) if len(sizes) < 3 else [tuple(sizes)]
    by_cost: dict[object, list[Piece]] = {}
    for nest in nests:
        for rows in splits([sizes[name] for name in nest], list(torus.values())):
            taken = [[*zip(nest, row, strict=True)] for row in rows]
            chains = [[factor for factor in chain if factor[1] > 1] for chain in taken]
            pieces = [
                Piece(name, torus_axis, size)
                for name in nest
                for torus_axis, chain in zip(torus, chains, strict=True)
                for other, size in chain
                if other == name
            ]
            by_cost.setdefault((str(sorted(chains[:-1])), str(chains[-1])), pieces)
    for pieces in sorted(filter(None, by_cost.values()), key=len):  # one device has none
        yield order_text(pieces, torus)


def splits(sizes: list[int], extents: list[int]) -> Iterator[list[tuple[int, ...]]]:
    """Yields ways to factor the axes of a torus: for each axis, the factor of every mesh axis."""
    if not extents:
        if all(size == 1 for size in sizes):
            yield []
        return
    for row in factors(sizes, extents[0]):
        left = [size // taken for size, taken in zip(sizes, row, strict=True)]
        for rest in splits(left, extents[1:]):
            yield [row, *rest]


def factors(sizes: list[int], extent: int) -> Iterator[tuple[int, ...]]:
    """Yields ways to factor an extent into one divisor of each size."""
    divisors = [n for n in range(1, extent + 1) if extent % n == 0]
    rows = itertools.product(*([n for n in divisors if size % n == 0] for size in sizes))
    return (row for row in rows if math.prod(row) == extent)


@dataclasses.dataclass(frozen=True)
class TopologyDevice:
    """Mimics a TPU core or a GPU, with the attributes that JAX reads to order devices."""

    id: int
    coords: tuple[int, int, int]
    core_on_chip: int
    device_kind: str
    platform: str = "tpu"
    process_index: int = 0
    slice_index: int = 0


def topology_devices(
    torus: Torus, kind: str, slices: int = 1, platform: str = "tpu"
) -> list[TopologyDevice]:
    """Returns devices numbered like TPUs: in a chip, a host of 2 x 2 chips, then along x, y and z.

    Devices of several equal slices are numbered slice by slice.
    """
    x, y, z = (torus.get(name, 1) for name in CHIP_AXES)
    places = itertools.product(range(x), range(y), range(z), range(torus[CORE]))

    def number(place: tuple[int, int, int, int]) -> tuple[int, ...]:
        x, y, z, core = place
        return (z, y // 2, x // 2, y % 2, x % 2, core)

    ordered = sorted(places, key=number)
    return [
        TopologyDevice(index * len(ordered) + i, (x, y, z), core, kind, platform, slice_index=index)
        for index in range(slices)
        for i, (x, y, z, core) in enumerate(ordered)
    ]
