"""How long a step takes on a slice: its products, its other work, and each mesh axis's traffic."""

import dataclasses
from collections.abc import Iterable, Mapping

import numpy as np
from jax.sharding import Mesh

from layouts.torus import Slice
from layouts.traffic import Collective

# The share of its peak that the matrix unit reaches in products of sizes that suit it: the Giant
# Models guide, section 2.4, and GShard, section 5.2.  Only where no compiler says better.
PRODUCT_UTILISATION = 0.85


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds of a step by what they go into."""

    products_s: float
    other_s: float
    """Work that is no matrix product; 0 where nothing was compiled."""
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


def coordinates(slice: Slice, mesh: Mapping[str, int], devices: Mesh | None) -> np.ndarray:
    """Where each device of a mesh stands on the torus: [mesh axes .., axes of the torus].

    Without devices, in the order in which a TPU numbers its cores: of a chip, then along x, then y.
    """
    axes = len(slice.extents)
    if devices is not None:
        places = [[*device.coords][:axes] for device in devices.devices.flat]
    else:
        chips = np.arange(slice.devices) // slice.chip.cores
        places = np.stack(np.unravel_index(chips, slice.extents[::-1])[::-1], axis=-1).tolist()
    return np.array(places).reshape(*mesh.values(), axes)


def seconds(slice: Slice, places: np.ndarray, mesh: Mapping[str, int], own: Collective) -> float:
    """How long one collective takes, each time."""
    index = tuple(np.s_[:] if name in own.mesh_axes else 0 for name in mesh)
    group = places[index].reshape(-1, places.shape[-1])[: own.group]
    return slice.seconds(own.kind, own.bytes, group)


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
    for own in collectives:
        axes = ",".join(name for name in mesh if name in own.mesh_axes)
        into = overlapped if own.overlaps else waits
        into[axes] = into.get(axes, 0.0) + own.times * seconds(slice, places, mesh, own)
    return Timing(products_s, other_s, waits, overlapped)
