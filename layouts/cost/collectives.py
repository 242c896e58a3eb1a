"""Exchanges of data between the devices of a mesh, whoever found them: a model or a compiler."""

import dataclasses
import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")


MODEL_FILE = re.compile(r"\b(?:models|trainer)/[\w/]+\.py$")


def model_file(path: str) -> str:
    """The part of a path that a user knows, where it is one of ours; else nothing.

    >>> model_file("/somewhere/models/moe/layer.py"), model_file("/somewhere/jax/moe.py")
    ('models/moe/layer.py', '')
    """
    found = MODEL_FILE.search(path)
    return found[0] if found else ""


class Collective(NamedTuple):
    """Devices that exchange data, in groups along mesh axes."""

    kind: str
    mesh_axes: tuple[str, ...]
    group: int
    """Devices in each group."""
    bytes: int
    """Of the whole tensor on one device: gathered, to be reduced, or exchanged."""
    times: int
    """In a step: each turn of a loop counts."""
    source: str
    """The line of the model, and the equation, that causes it."""
    overlaps: bool = False
    """Whether the device may compute meanwhile."""

    @property
    def received_bytes(self) -> float:
        """What a device receives in a step, where data goes round in a ring."""
        share = 1.0 if self.kind == "collective-permute" else (self.group - 1) / self.group
        return self.times * self.bytes * share * (2 if self.kind == "all-reduce" else 1)


@dataclasses.dataclass(frozen=True)
class UnexpectedTraffic:
    """Traffic along a mesh axis that a compiler made more or less than the model asks for."""

    mesh_axis: str
    compiled_bytes: float
    expected_bytes: float
    sources: tuple[str, ...]
    """What accounts for most of the difference."""

    def __str__(self) -> str:
        more = "more" if self.compiled_bytes > self.expected_bytes else "less"
        return (
            f"over {self.mesh_axis} a device receives {self.compiled_bytes / 1e6:,.1f} MB a step, "
            f"{more} than the {self.expected_bytes / 1e6:,.1f} MB that the layout asks for: "
            f"{'; '.join(self.sources)}"
        )


def by_mesh_axis(collectives: Iterable[Collective], mesh: Mapping[str, int]) -> dict[str, float]:
    """Bytes that a device receives in a step along each mesh axis.

    Data that goes over several goes over the first whole, over the next in parts of it.

    >>> both = Collective("all-reduce", ("x", "y"), 8, 800, 1, "")
    >>> by_mesh_axis([both], {"x": 4, "y": 2}), both.received_bytes
    ({'x': 1200.0, 'y': 200.0}, 1400.0)
    """
    found = dict.fromkeys(mesh, 0.0)
    for own in collectives:
        shares, left = dict[str, float](), 1.0
        for name in (name for name in mesh if name in own.mesh_axes):
            shares[name] = left * (1 - 1 / mesh[name])
            left /= mesh[name]
        for name, share in shares.items():
            found[name] += own.received_bytes * share / sum(shares.values())
    return found


def unexpected_traffic(
    compiled: Iterable[Collective],
    expected: Iterable[Collective],
    mesh: Mapping[str, int],
    tolerance: float = 0.1,
) -> list[UnexpectedTraffic]:
    """Mesh axes whose traffic the compiler made another than the layout asks for."""
    compiled, expected = list(compiled), list(expected)
    found, wanted = by_mesh_axis(compiled, mesh), by_mesh_axis(expected, mesh)
    return [
        UnexpectedTraffic(
            name, found[name], wanted[name], tuple(differences(name, compiled, expected))
        )
        for name in mesh
        if abs(found[name] - wanted[name]) > tolerance * wanted[name]
    ]


def differences(
    mesh_axis: str, compiled: Iterable[Collective], expected: Iterable[Collective], count: int = 3
) -> Iterator[str]:
    """Lines of the model, and kinds, that differ the most along a mesh axis."""
    lines: dict[str, Counter[str]] = {}
    for own, sign in [*((c, 1) for c in compiled), *((c, -1) for c in expected)]:
        if mesh_axis in own.mesh_axes:
            place = own.source.split(" ")[0] + " (backward)" * own.source.endswith("(backward)")
            lines.setdefault(place, Counter())[own.kind] += round(sign * own.received_bytes)
    largest = sorted(lines.items(), key=lambda item: -abs(sum(item[1].values())))
    for place, kinds in largest[:count]:
        parts = (f"{size / 1e6:+,.1f} MB of {kind}" for kind, size in kinds.items() if size)
        yield f"{place}: {', '.join(parts)}"


def heaviest(collectives: Iterable[Collective]) -> list[Collective]:
    """The collectives that send the most first, those that are alike taken together."""

    def kind(own: Collective) -> tuple:
        return own._replace(times=0)

    joined = []
    for _, alike in itertools.groupby(sorted(collectives, key=kind), key=kind):
        same = list(alike)
        joined.append(same[0]._replace(times=sum(own.times for own in same)))
    return sorted(joined, key=lambda own: -own.received_bytes)


def format_mesh(mesh: Mapping[str, int]) -> str:
    """
    >>> format_mesh({"x": 32, "y": 64})
    'x:32,y:64'
    """
    return ",".join(f"{name}:{size}" for name, size in mesh.items())
