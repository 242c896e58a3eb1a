"""Exchanges of data between the devices of a mesh, whoever found them: a model or a compiler."""

import dataclasses
import itertools
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")


MODEL_FILE = re.compile(r"\b(?:models|trainer)/\w+\.py$")


def model_file(path: str) -> str:
    """The part of a path that a user knows, where it is one of ours; else nothing.

    >>> model_file("/somewhere/models/moe.py"), model_file("/somewhere/jax/moe.py")
    ('models/moe.py', '')
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
class Surprise:
    """Traffic along mesh axes that a compiler added to, or saved from, what the model asks for."""

    mesh_axes: tuple[str, ...]
    compiled_bytes: float
    expected_bytes: float
    sources: tuple[str, ...]
    """The largest of the compiled ones, or of the expected where there are none."""

    def __str__(self) -> str:
        more = "more" if self.compiled_bytes > self.expected_bytes else "less"
        return (
            f"over {', '.join(self.mesh_axes)}: {self.compiled_bytes / 1e6:,.1f} MB a device, "
            f"{more} than the {self.expected_bytes / 1e6:,.1f} MB that the layout asks for; "
            f"largest: {'; '.join(self.sources)}"
        )


def by_axes(collectives: Iterable[Collective]) -> dict[tuple[str, ...], float]:
    """Bytes that a device receives in a step along each mesh axis, or several at once."""
    found: dict[tuple[str, ...], float] = {}
    for own in collectives:
        axes = tuple(sorted(own.mesh_axes))
        found[axes] = found.get(axes, 0.0) + own.received_bytes
    return found


def surprises(
    compiled: Iterable[Collective], expected: Iterable[Collective], tolerance: float = 0.1
) -> list[Surprise]:
    """Mesh axes whose traffic the compiler made another than the layout asks for."""
    compiled, expected = list(compiled), list(expected)
    found, wanted = by_axes(compiled), by_axes(expected)
    total = max(sum(found.values()), 1.0)
    listed = []
    for axes in found | wanted:
        own, other = found.get(axes, 0.0), wanted.get(axes, 0.0)
        if abs(own - other) > tolerance * max(other, 0.01 * total):
            listed.append(Surprise(axes, own, other, largest(compiled if own else expected, axes)))
    return sorted(listed, key=lambda one: -abs(one.compiled_bytes - one.expected_bytes))


def largest(
    collectives: Iterable[Collective], mesh_axes: tuple[str, ...], count: int = 3
) -> tuple[str, ...]:
    own = [c for c in collectives if tuple(sorted(c.mesh_axes)) == mesh_axes]
    own.sort(key=lambda c: -c.received_bytes)
    return tuple(dict.fromkeys(f"{c.kind} at {c.source}" for c in own[:count]))


def heaviest(collectives: Iterable[Collective]) -> list[Collective]:
    """The collectives that send the most first, those that are alike taken together."""

    def kind(own: Collective) -> tuple:
        return own._replace(times=0)

    joined = []
    for _, alike in itertools.groupby(sorted(collectives, key=kind), key=kind):
        same = list(alike)
        joined.append(same[0]._replace(times=sum(own.times for own in same)))
    return sorted(joined, key=lambda own: -own.received_bytes)


def mesh_of(mesh: Mapping[str, int]) -> str:
    """
    >>> mesh_of({"x": 32, "y": 64})
    'x:32,y:64'
    """
    return ",".join(f"{name}:{size}" for name, size in mesh.items())
