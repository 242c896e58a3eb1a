"""Describes collectives, whether counted in a trace or read from a compiled program."""

import functools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from configs.imports import CHECKOUT

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
TOLERANCE = 0.1  # relative difference from the traffic that the layout requires


@functools.cache
def checkout_file(path: str) -> str:
    """Returns a path relative to this checkout; "" for files of layouts/ and of libraries.

    A program from the compilation cache may contain paths of another checkout.
    """
    parts = path.strip("/").split("/")
    if "site-packages" in parts:
        return ""
    files = ("/".join(parts[i:]) for i in range(len(parts) - 1) if parts[i] != "layouts")
    return next((file for file in files if (CHECKOUT / file).is_file()), "")


class Collective(NamedTuple):
    """Describes one collective operation, over groups of devices along mesh axes."""

    kind: str
    mesh_axes: tuple[str, ...]
    group: int
    """Devices in each group."""
    bytes: int
    """Of the tensor on one device: after a gather, before a reduction, or exchanged."""
    times: int
    """Executions in a step, including every iteration of a loop."""
    source: str
    """The line of the model, and the equation, that causes it."""
    overlaps: bool = False
    """Whether the device computes at the same time."""
    scopes: str = ""
    """The named scopes in which it was traced."""

    @property
    def received_bytes(self) -> float:
        """Counts the bytes that a device receives in a step, with ring algorithms."""
        share = 1.0 if self.kind == "collective-permute" else (self.group - 1) / self.group
        return self.times * self.bytes * share * (2 if self.kind == "all-reduce" else 1)


def by_mesh_axis(collectives: Iterable[Collective], mesh: Mapping[str, int]) -> dict[str, float]:
    """Returns the bytes that a device receives in a step along each mesh axis.

    A collective over several axes sends all its data over the first, and a shard over the next.
    """
    received = dict.fromkeys(mesh, 0.0)
    for collective in collectives:
        shares, left = dict[str, float](), 1.0
        for name in (name for name in mesh if name in collective.mesh_axes):
            shares[name] = left * (1 - 1 / mesh[name])
            left /= mesh[name]
        for name, share in shares.items():
            received[name] += collective.received_bytes * share / sum(shares.values())
    return received


def unexpected_traffic(
    compiled: Iterable[Collective], expected: Iterable[Collective], mesh: Mapping[str, int]
) -> Iterator[str]:
    """Describes compiled traffic, by mesh axis, that differs from what the layout requires.

    Names the lines that account for most of the difference.
    """
    compiled, expected = list(compiled), list(expected)
    sizes, expected_sizes = by_mesh_axis(compiled, mesh), by_mesh_axis(expected, mesh)
    for name, size in sizes.items():
        required = expected_sizes[name]
        if abs(size - required) > TOLERANCE * required:
            sources = "; ".join(differences(name, compiled, expected))
            yield (
                f"over {name} a device receives {size_text(size)} a step, "
                f"{'more' if size > required else 'less'} than the {size_text(required)} that the "
                f"layout requires{': ' * bool(sources)}{sources}"
            )


def differences(
    mesh_axis: str, compiled: Iterable[Collective], expected: Iterable[Collective]
) -> Iterator[str]:
    """Yields the three lines of the model whose traffic along a mesh axis differs the most."""
    lines: dict[str, Counter[str]] = {}
    for collective, sign in [*((c, 1) for c in compiled), *((c, -1) for c in expected)]:
        if mesh_axis in collective.mesh_axes:
            source = collective.source
            line = source.split(" ")[0] + " (backward)" * source.endswith("(backward)")
            received_bytes = round(sign * collective.received_bytes)
            lines.setdefault(line, Counter())[collective.kind] += received_bytes
    differing = [(line, kinds) for line, kinds in lines.items() if any(kinds.values())]
    for line, kinds in sorted(differing, key=lambda item: -abs(sum(item[1].values())))[:3]:
        parts = (
            f"{'+' if size > 0 else '-'}{size_text(abs(size))} of {kind}"
            for kind, size in kinds.items()
            if size
        )
        yield f"{line}: {', '.join(parts)}"


def heaviest(collectives: Iterable[Collective]) -> list[Collective]:
    """Merges equal collectives, and sorts them by the bytes they receive, largest first."""
    times = Counter[Collective]()
    for collective in collectives:
        times[collective._replace(times=0)] += collective.times
    merged = (kind._replace(times=count) for kind, count in sorted(times.items()))
    return sorted(merged, key=lambda collective: -collective.received_bytes)


def format_mesh(mesh: Mapping[str, int]) -> str:
    """Formats the sizes of a mesh as in settings: x:32,y:64."""
    return ",".join(f"{name}:{size}" for name, size in mesh.items())


def size_text(amount: float, unit: str = "B") -> str:
    """Formats an amount (bytes, unless a unit is given) with a metric prefix."""
    prefixes = iter(" kMGTPEZY")
    prefix = next(prefixes).strip()
    while float(f"{amount:.3g}") >= 1000:
        amount, prefix = amount / 1000, next(prefixes)
    return f"{amount:.3g} {prefix}{unit}"
