"""How long a step takes on a slice: its products, its other work, and each mesh axis's traffic."""

import dataclasses
from collections.abc import Iterable, Mapping

import numpy as np

from layouts.cost.collectives import Collective
from layouts.cost.hardware import Chip
from layouts.cost.interconnect import Slice
from layouts.cost.jaxpr_cost import OpCost
from layouts.device_order import topology_devices
from layouts.mesh import in_order

# The share of its peak that the matrix unit reaches in products of sizes that suit it: the Giant
# Models guide, section 2.4, and GShard, section 5.2.  Only where no compiler says better.
PRODUCT_UTILISATION = 0.85


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds of a step by what they go into."""

    products_s: float
    other_s: float
    """Work that is no matrix product."""
    traffic_s: Mapping[str, float]
    """By mesh axis, or several with commas; while the device waits."""
    overlapped_s: Mapping[str, float]
    """The same, while the device may compute."""
    memory_s: float = 0.0
    """Reading what the step reads once, at the memory's bandwidth; 0 where cycles tell it."""

    @property
    def step_s(self) -> float:
        compute = max(self.products_s + self.other_s, self.memory_s)
        return max(compute, sum(self.overlapped_s.values())) + sum(self.traffic_s.values())

    @property
    def parts(self) -> dict[str, float]:
        """All parts by name."""
        waits_s = max(0.0, self.memory_s - self.products_s - self.other_s)
        return {
            "matrix products": self.products_s,
            "other compute": self.other_s,
            **({"waiting for memory": waits_s} if self.memory_s else {}),
            **{f"traffic over {axes}": s for axes, s in self.traffic_s.items()},
            **{f"overlapped traffic over {axes}": s for axes, s in self.overlapped_s.items()},
        }


def coordinates(slice: Slice, mesh: Mapping[str, int], order: str | None) -> np.ndarray:
    """Where each device of a mesh stands on the torus: [mesh axes .., axes of the torus]."""
    devices = in_order(topology_devices(slice.torus, slice.chip.kind), mesh, order)
    axes = len(slice.extents)
    return np.array([d.coords[:axes] for d in devices.flat]).reshape(*mesh.values(), axes)


def seconds(slice: Slice, places: np.ndarray, mesh: Mapping[str, int], own: Collective) -> float:
    """How long one collective takes, each time."""
    index = tuple(np.s_[:] if name in own.mesh_axes else 0 for name in mesh)
    group = places[index].reshape(-1, places.shape[-1])[: own.group]
    return slice.seconds(own.kind, own.bytes, group)


def compute_s(chip: Chip, work: Iterable[OpCost]) -> tuple[float, float]:
    """Products and other work: each takes as long as its FLOPs, or as its way through memory."""
    products_s, other_s = 0.0, 0.0
    for own in work:
        multiplied_s = own.flops / chip.peak_flops / PRODUCT_UTILISATION
        spent_s = own.times * max(multiplied_s, own.bytes / chip.memory_bandwidth)
        products_s += spent_s if own.flops else 0.0
        other_s += 0.0 if own.flops else spent_s
    return products_s, other_s


def cycles_s(chip: Chip, cycles: Mapping[str, int]) -> tuple[float, float]:
    """Products and other work, as a compiler estimates their cycles."""
    return cycles["products"] / chip.clock_hz, cycles["other"] / chip.clock_hz


def add_up(
    slice: Slice,
    places: np.ndarray,
    mesh: Mapping[str, int],
    collectives: Iterable[Collective],
    products_s: float,
    other_s: float,
) -> Timing:
    """Adds up the parts of a step."""
    waits: dict[str, float] = {}
    overlapped: dict[str, float] = {}
    paces: dict[Collective, float] = {}  # of a byte, of each kind and group
    for own in collectives:
        kind = own._replace(bytes=1, times=1, source="")
        if kind not in paces:
            paces[kind] = seconds(slice, places, mesh, kind)
        axes = ",".join(name for name in mesh if name in own.mesh_axes)
        into = overlapped if own.overlaps else waits
        into[axes] = into.get(axes, 0.0) + own.times * own.bytes * paces[kind]
    return Timing(products_s, other_s, waits, overlapped)
