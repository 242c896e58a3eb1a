"""Estimates how long collectives take on TPU slices and GPU nodes; lists the available sizes.

For TPUs, the time follows from links, rings and bisections; for GPUs, from what each sends inside
its node and to other nodes.
"""

import dataclasses
import functools
import itertools
import math
import re

import numpy as np

from configs.errors import UserError, did_you_mean
from layouts.cost import hardware
from layouts.cost.hardware import CHIPS, GPUS, GPUS_OF_A_NODE, Chip
from layouts.device_order import CHIP_AXES, CORE

RING = {"all-gather": 1, "reduce-scatter": 1, "all-reduce": 2}  # times that the data goes round


@dataclasses.dataclass(frozen=True)
class Topology:
    """Describes a box of chips, as in "v3:32x32", or several equal boxes, as in "2xv5e:16x16".

    A node of GPUs is a box as well: "h100:4x8" stands for four nodes of eight GPUs.
    """

    name: str
    chip: Chip
    extents: tuple[int, ...]
    count: int = 1
    """Boxes, which the network of a data center connects."""

    @classmethod
    def named(cls, name: str) -> "Topology":
        """Parses a name: the kind of chips, and how many along each axis of the torus."""
        head, _, sizes = name.partition(":")
        if head in GPUS:
            nodes = re.fullmatch(rf"([1-9]\d*)x({'|'.join(map(str, GPUS_OF_A_NODE))})", sizes)
            if nodes is None:
                raise UserError(
                    f"--topology={name}: legal: {head}:, then nodes and GPUs of each with x "
                    f"between them, as in {head}:4x8; a node has 1, 2, 4 or 8."
                )
            return cls(name, GPUS[head], (int(nodes[2]),), int(nodes[1]))
        several = re.fullmatch(r"([1-9]\d*)x(.*)", head)
        count, kind = (int(several[1]), several[2]) if several else (1, head)
        if kind in GPUS:
            raise UserError(
                f"--topology={name}: nodes of GPUs follow the colon, as in {kind}:{count}x8."
            )
        if kind not in CHIPS:
            near, legal = did_you_mean(kind, (*CHIPS, *GPUS)), ", ".join(CHIPS)
            raise UserError(
                f"--topology={name}: unknown chip {kind!r}.{near}  Legal: {legal}, "
                f"then a colon and the chips along each axis, as in v3:32x32; {', '.join(GPUS)}, "
                "then a colon, nodes and GPUs of each, as in h100:4x8."
            )
        chip = CHIPS[kind]
        if not re.fullmatch("x".join([r"[1-9]\d*"] * chip.axes), sizes):
            example = f"{kind}:" + "x".join(["4"] * chip.axes)
            raise UserError(
                f"--topology={name}: {kind} has a torus of {chip.axes} axes.  Legal: {kind}:, then "
                f"{chip.axes} numbers of chips with x between them, as in {example}."
            )
        if count > 1 and kind not in hardware.NETWORK_BANDWIDTH:
            raise UserError(
                f"--topology={name}: the bandwidth of the network between slices of {kind} is not "
                f"published.  Legal: one slice, {kind}:{sizes}, or several of "
                f"{', '.join(kind for kind in CHIPS if kind in hardware.NETWORK_BANDWIDTH)}."
            )
        name = name if count > 1 else f"{kind}:{sizes}"  # also for "1xv5e:4x4"
        return cls(name, chip, tuple(int(size) for size in sizes.split("x")), count)

    @classmethod
    def of(cls, devices: np.ndarray) -> "Topology | None":
        """Returns the box of chips that these devices are on; None if their kind is unknown."""
        device_kind = devices.flat[0].device_kind  # "TPU v5 lite" comes before "TPU v5"
        kinds = (kind for kind, chip in CHIPS.items() if device_kind.startswith(chip.kind))
        kind = next(kinds, None)
        if kind is None:
            return None
        axes = CHIPS[kind].axes
        coords = np.array([device.coords[:axes] for device in devices.flat])
        extents = tuple(int(n) for n in coords.max(axis=0) - coords.min(axis=0) + 1)
        count = len({getattr(device, "slice_index", 0) for device in devices.flat})
        several = f"{count}x" if count > 1 else ""
        return cls(f"{several}{kind}:{'x'.join(map(str, extents))}", CHIPS[kind], extents, count)

    @property
    def kind(self) -> str:
        return next(kind for kind, chip in {**CHIPS, **GPUS}.items() if chip == self.chip)

    @property
    def hosts(self) -> int:
        """Returns the number of hosts: one per node of GPUs, or per four TPU chips."""
        return self.count if self.is_gpu else -(-self.chips // 4)

    @property
    def is_gpu(self) -> bool:
        return self.chip.platform == "gpu"

    @property
    def torus(self) -> dict[str, int]:
        """Returns the number of chips along each axis of a box, then of cores in a chip."""
        axes = (*CHIP_AXES[: len(self.extents)], CORE)
        return dict(zip(axes, (*self.extents, self.chip.cores), strict=True))

    @property
    def chips(self) -> int:
        return self.count * math.prod(self.extents)

    @property
    def devices(self) -> int:
        return self.chips * self.chip.cores

    def along(self, coordinates: np.ndarray) -> list[tuple[int, int, bool]]:
        """Returns how chips at these coordinates are arranged along each axis in which they differ.

        Each entry is their number, the stride between them (which is also the number of groups that
        share the links), and whether they form a ring.
        """
        along = []
        is_torus = len(self.extents) < 3 or min(self.extents) >= CUBE_SIDE
        for axis, extent in enumerate(self.extents):
            coords = np.unique(coordinates[:, axis])
            if len(coords) == 1:
                continue
            stride = int(coords[-1] - coords[0]) // (len(coords) - 1)
            ring = is_torus and extent % self.chip.wraps == 0 and len(coords) * stride == extent
            along.append((len(coords), stride, ring))
        return along

    def seconds(self, kind: str, size_bytes: float, coords: np.ndarray) -> float:
        """Returns the seconds of one collective among these devices.

        `coords` are [x, y, ..] of each device's chip, then the number of its box if there are
        several boxes.  In a permutation, each device sends to the next one.  Between boxes, each
        device exchanges the shard that it keeps inside its box, before a gather or after a
        reduction there.  A box with fewer devices of the group has larger shards.
        """
        if self.count == 1:
            return self.seconds_inside(kind, size_bytes, coords)
        boxes, devices = np.unique(coords[:, -1], return_counts=True)
        inside = coords[coords[:, -1] == boxes[np.argmax(devices)], :-1]
        inside_s = self.seconds_inside(kind, size_bytes, inside) if len(inside) > 1 else 0.0
        if len(boxes) == 1:
            return inside_s
        sent_bytes = RING.get(kind, 1) * size_bytes / (np.min(devices) if kind in RING else 1)
        share = 1 if kind == "collective-permute" else 1 - 1 / len(boxes)
        # Bytes per second between boxes that a device has while all devices send.
        rate = hardware.NETWORK_BANDWIDTH[self.kind] * hardware.LINK_UTILISATION / self.chip.cores
        return float(inside_s + share * sent_bytes / rate)

    def seconds_inside(self, kind: str, size_bytes: float, coords: np.ndarray) -> float:
        """Returns the seconds of one collective among devices of one box.

        Gathers and reductions use rings along all axes of the torus at once; an all-to-all must
        cross the middle of the longest axis.  A switch serves all GPUs at the same time.
        """
        if self.is_gpu:
            share = 1 if kind == "collective-permute" else 1 - 1 / len(coords)
            sent_bytes = RING.get(kind, 1) * size_bytes * share
            return sent_bytes / (self.chip.link_bandwidth * hardware.LINK_UTILISATION)
        chips = np.unique(coords, axis=0)
        cores = len(coords) / len(chips)  # of a chip that are in the group
        groups = self.chip.cores / cores  # that share a chip, and so its links
        if len(chips) == 1:
            return RING.get(kind, 1) * size_bytes / self.chip.memory_bandwidth
        link, along = self.chip.link_bandwidth * hardware.LINK_UTILISATION, self.along(chips)
        if kind == "collective-permute":  # the last sends to the first over links that are free
            hops = np.abs(np.diff(coords, axis=0)).sum(axis=1)
            return groups * float(hops.max()) * size_bytes / link
        if kind in RING:
            links = sum((2 if wraps else 1) / stride for _, stride, wraps in along)
            sent_bytes = RING[kind] * size_bytes * (1 - 1 / len(chips))
            return groups * sent_bytes / (links * link)
        chip_bytes = groups * cores * size_bytes
        crossing = max(n * stride / (8 if wraps else 4) for n, stride, wraps in along)
        return chip_bytes * crossing / link


# Slices larger than those of chips.toml consist of full cubes, AxBxC with A <= B <= C.  Their axes
# are rings; the axes of smaller slices with three axes are not.
CUBE_SIDE = 4
MAX_CHIPS_OF_CUBES = {"v4": 4096, "v5p": 6144, "tpu7x": 9216}
# Not offered: the eight chips on which the Giant Models guide serves its 64B (section 3.2).
PUBLISHED = {"v3:4x2"}
MAX_NEARBY = 4  # in a message
LARGEST_NODES = 2048  # of GPUs, that a plan suggests


@functools.cache
def offered_slices(kind: str) -> tuple[Topology, ...]:
    """Returns all slices of a kind, ordered by number of chips, then from compact to long.

    For GPUs, these are the sizes of one node, then powers of two of full nodes.
    """
    if kind in GPUS:
        full, doublings = GPUS_OF_A_NODE[-1], range(1, LARGEST_NODES.bit_length())
        shapes = [*(f"1x{n}" for n in GPUS_OF_A_NODE), *(f"{2**i}x{full}" for i in doublings)]
    else:
        cubes = shapes_of_cubes(MAX_CHIPS_OF_CUBES.get(kind, 0))
        shapes = [*hardware.TABLE["slices"][kind].split(), *cubes]
    slices = (Topology.named(f"{kind}:{shape}") for shape in shapes)
    return tuple(sorted(slices, key=lambda topology: (topology.chips, max(topology.extents))))


def shapes_of_cubes(max_chips: int) -> list[str]:
    """Returns the shapes of slices of full cubes, up to a number of chips."""
    sides = range(CUBE_SIDE, max_chips // CUBE_SIDE**2 + 1, CUBE_SIDE)
    boxes = itertools.combinations_with_replacement(sides, 3)
    return ["x".join(map(str, box)) for box in boxes if math.prod(box) <= max_chips]


def check_offered(topology: Topology) -> None:
    """Raises an error that lists slices of similar size if Google Cloud does not offer this one."""
    offered, chips = offered_slices(topology.kind), math.prod(topology.extents)  # of one box
    is_offered = any(other.extents == topology.extents for other in offered)
    if is_offered or topology.name in PUBLISHED:
        return
    nearest = sorted(offered, key=lambda other: abs(math.log(other.chips / chips)))
    nearby = [other.name for other in offered if other in nearest[:MAX_NEARBY]]
    raise UserError(
        f"--topology={topology.name}: Google Cloud offers no such slice.  "
        f"Legal nearby: {', '.join(nearby)}."
    )
