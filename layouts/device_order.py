"""The order of devices: which axes of the torus each mesh axis lies along.

"data:y;model:x;model:core" puts the mesh axis model along x, and on both cores of each chip.  A
number takes a part: in "data:x4;model:x8" a row of 32 chips is 4 runs of 8 neighbours, since what
is named later lies nearer.
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
    """What a mesh axis takes of an axis of the torus."""

    mesh_axis: str
    torus_axis: str
    size: int | None  # None: all that others leave


def parse(order: str) -> list[Piece]:
    """
    >>> parse("data:y;model:x8")
    [Piece(mesh_axis='data', torus_axis='y', size=None), \
Piece(mesh_axis='model', torus_axis='x', size=8)]
    """
    found = []
    for part in parts(order):
        match = re.fullmatch(r"(\w+):([a-z]+)(\d*)", part)
        if match is None:
            raise ValueError(f"{part!r} is no mesh_axis:torus_axis, as in 'model:x' or 'model:x8'.")
        found.append(Piece(match[1], match[2], int(match[3]) if match[3] else None))
    return found


def torus_of(devices: Sequence[Any]) -> dict[str, int] | None:
    """The box that these devices fill; None where they have no coordinates."""
    if not all(hasattr(device, "coords") for device in devices):
        return None
    places = np.array([place(device) for device in devices])
    extents = np.ptp(places, axis=0) + 1
    return dict(zip((*CHIP_AXES[: places.shape[1] - 1], CORE), extents.tolist(), strict=True))


def place(device: Any) -> tuple[int, ...]:
    return (*device.coords, device.core_on_chip)


def check_order(order: str, mesh: Mapping[str, int], torus: Torus | None) -> None:
    """Raises all that is wrong with an order."""
    found = mistakes(order, mesh, torus)
    if found:
        raise UserError(f"Layout.order = {order!r}: {'  '.join(found)}  {legal(mesh, torus)}")


def mistakes(order: str, mesh: Mapping[str, int], torus: Torus | None) -> list[str]:
    """What is wrong with an order; without a torus, only what no torus would make right."""
    try:
        pieces = parse(order)
    except ValueError as error:
        return [str(error)]
    axes = torus or dict.fromkeys((*CHIP_AXES, CORE))
    found = []
    for name, known in (("mesh_axis", mesh), ("torus_axis", axes)):
        for own in dict.fromkeys(getattr(piece, name) for piece in pieces):
            if own not in known:
                near, what = did_you_mean(own, known), name.replace("_", " ")
                found.append(f"no such {what}: {own}.{near}  There are {', '.join(known)}.")
    return found or ([] if torus is None else misfits(pieces, mesh, torus))


def misfits(pieces: Sequence[Piece], mesh: Mapping[str, int], torus: Torus) -> list[str]:
    """Axes that are taken more than once, or whose pieces do not multiply to their size."""
    sized, found = filled(pieces, torus), []
    for torus_axis, extent in torus.items():
        own = [piece for piece in sized if piece.torus_axis == torus_axis]
        if sum(piece.size is None for piece in pieces if piece.torus_axis == torus_axis) > 1:
            found.append(f"{torus_axis} is taken whole more than once.")
        elif (product := math.prod(piece.size or 0 for piece in own)) != extent:
            taken = f"{written(own, torus)} takes {product}" if own else "nothing lies along it"
            found.append(f"{torus_axis} has {extent}, and {taken}.")
    for mesh_axis, size in mesh.items():
        own = [piece for piece in sized if piece.mesh_axis == mesh_axis]
        if not found and (product := math.prod(piece.size or 0 for piece in own)) != size:
            taken = f"{written(own, torus)} gives it {product}" if own else "nothing names it"
            found.append(f"{mesh_axis} = {size}, and {taken}.")
    return found


def filled(pieces: Sequence[Piece], torus: Torus) -> list[Piece]:
    """The same pieces, each with its size."""

    def left(torus_axis: str) -> int:
        others = (p.size for p in pieces if p.torus_axis == torus_axis and p.size is not None)
        return torus[torus_axis] // max(1, math.prod(others))

    return [p if p.size is not None else p._replace(size=left(p.torus_axis)) for p in pieces]


def written(pieces: Sequence[Piece], torus: Torus) -> str:
    """An order in the words of a layout file."""
    names = (
        f"{mesh_axis}:{torus_axis}{'' if size == torus[torus_axis] else size}"
        for mesh_axis, torus_axis, size in pieces
    )
    return ";".join(names) or "nothing"


def legal(mesh: Mapping[str, int], torus: Torus | None) -> str:
    if torus is None:
        return "Legal: a mesh axis, a colon and x, y, z or core, as in 'data:y;model:x;model:core'."
    shown = list(itertools.islice(orders(mesh, torus), SHOWN))
    if not shown:
        return "Legal: none, which is JAX's order; a mesh of all devices has others."
    return f"Legal: {', '.join(map(repr, shown))} and others, or none: JAX's order."


def device_permutation(order: str, mesh: Mapping[str, int], torus: Torus) -> np.ndarray:
    """The places of the torus, counted with the last axis first, as an array of the mesh's sizes.

    >>> device_permutation("data:x;model:y", {"data": 2, "model": 3}, {"x": 2, "y": 3, "core": 1})
    array([[0, 1, 2],
           [3, 4, 5]])
    """
    pieces = filled(parse(order), torus)
    by_torus = sorted(pieces, key=lambda piece: [*torus].index(piece.torus_axis))
    by_mesh = sorted(range(len(pieces)), key=lambda i: [*mesh].index(by_torus[i].mesh_axis))
    # `sorted` keeps what is named later behind, so a later piece is an inner one on either side.
    numbers = np.arange(math.prod(torus.values())).reshape([piece.size or 0 for piece in by_torus])
    return numbers.transpose(by_mesh).reshape(tuple(mesh.values()))


def orders(mesh: Mapping[str, int], torus: Torus) -> Iterator[str]:
    """Orders that differ in what they cost: the fewest pieces first.

    Each mesh axis may take a part of each axis of the torus, as neighbours or spread out.  Axes of
    the torus that are alike are not tried in turn.
    """
    sizes = {name: size for name, size in mesh.items() if size > 1}
    nests = list(itertools.permutations(sizes)) if len(sizes) < 3 else [tuple(sizes)]
    found: dict[object, list[Piece]] = {}
    for nest in nests:
        for rows in splits([sizes[name] for name in nest], list(torus.values())):
            taken = [[*zip(nest, row, strict=True)] for row in rows]
            chains = [[own for own in chain if own[1] > 1] for chain in taken]
            own = [
                Piece(name, torus_axis, size)
                for name in nest
                for torus_axis, chain in zip(torus, chains, strict=True)
                for other, size in chain
                if other == name
            ]
            key = (str(sorted(chains[:-1])), str(chains[-1]))
            found.setdefault(key, own)
    for pieces in sorted(found.values(), key=len):
        yield written(pieces, torus)


def splits(sizes: list[int], extents: list[int]) -> Iterator[list[tuple[int, ...]]]:
    """Ways to share out axes of a torus to mesh axes: for each, what every mesh axis takes.

    >>> list(splits([2, 4], [4, 2]))
    [[(1, 4), (2, 1)], [(2, 2), (1, 2)]]
    """
    if not extents:
        if all(size == 1 for size in sizes):
            yield []
        return
    for row in shares(sizes, extents[0]):
        left = [size // taken for size, taken in zip(sizes, row, strict=True)]
        for rest in splits(left, extents[1:]):
            yield [row, *rest]


def shares(sizes: list[int], extent: int) -> Iterator[tuple[int, ...]]:
    """Factors of one extent, each of which divides its size."""
    if not sizes:
        if extent == 1:
            yield ()
        return
    for own in range(1, extent + 1):
        if extent % own == 0 and sizes[0] % own == 0:
            for rest in shares(sizes[1:], extent // own):
                yield (own, *rest)


@dataclasses.dataclass(frozen=True)
class TopologyDevice:
    """As much of a TPU core as JAX asks for when it puts devices into order."""

    id: int
    coords: tuple[int, int, int]
    core_on_chip: int
    device_kind: str
    platform: str = "tpu"
    process_index: int = 0


def topology_devices(torus: Torus, kind: str) -> list[TopologyDevice]:
    """Devices as TPUs number them: of a chip, of a host of 2 x 2 chips, then along x, y and z."""
    x, y, z = (torus.get(name, 1) for name in CHIP_AXES)
    places = itertools.product(range(x), range(y), range(z), range(torus[CORE]))

    def number(place: tuple[int, int, int, int]) -> tuple[int, ...]:
        x, y, z, core = place
        return (z, y // 2, x // 2, y % 2, x % 2, core)

    ordered = enumerate(sorted(places, key=number))
    return [TopologyDevice(i, (x, y, z), core, kind) for i, (x, y, z, core) in ordered]
