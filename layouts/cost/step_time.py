"""Estimates the step time on a slice: products, other operations, traffic by mesh axis."""

import dataclasses
import math
from collections.abc import Iterable, Mapping

import numpy as np

from layouts.cost.collectives import Collective
from layouts.cost.dataflow import KernelWork
from layouts.cost.hardware import PRODUCT_UTILISATION, Chip
from layouts.cost.interconnect import Topology
from layouts.cost.jaxpr_cost import OpCost
from layouts.device_order import topology_devices
from layouts.mesh import over_slices

LOW_PRODUCT_UTILISATION = 0.5
"""The share of the peak that products reach at the slow end of the range in a plan for GPUs."""


@dataclasses.dataclass(frozen=True)
class Timing:
    """Holds the seconds of a step, broken down by their cause."""

    products_s: float
    other_s: float
    """Operations other than matrix products."""
    traffic_s: Mapping[str, float]
    """By mesh axis, or several joined by commas; not overlapped with compute."""
    overlapped_s: Mapping[str, float]
    """The same, overlapped with compute."""
    memory_s: float = 0.0
    """Time to read what the step reads once, at memory bandwidth; 0 if cycles include it."""

    @property
    def step_s(self) -> float:
        compute = max(self.products_s + self.other_s, self.memory_s)
        return max(compute, sum(self.overlapped_s.values())) + sum(self.traffic_s.values())

    @property
    def range_s(self) -> tuple[float, float]:
        """Returns the step time with all traffic overlapped, and with none plus slow products."""
        compute_s = max(self.products_s + self.other_s, self.memory_s)
        traffic_s = sum(self.traffic_s.values()) + sum(self.overlapped_s.values())
        slow_s = self.products_s * PRODUCT_UTILISATION / LOW_PRODUCT_UTILISATION + self.other_s
        return max(compute_s, traffic_s), max(slow_s, self.memory_s) + traffic_s

    @property
    def parts(self) -> dict[str, float]:
        """Lists all parts by name."""
        waits_s = max(0.0, self.memory_s - self.products_s - self.other_s)
        return {
            "matrix products": self.products_s,
            "other compute": self.other_s,
            **({"waiting for memory": waits_s} if self.memory_s else {}),
            **{f"traffic over {axes}": s for axes, s in self.traffic_s.items()},
            **{f"overlapped traffic over {axes}": s for axes, s in self.overlapped_s.items()},
        }


def coordinates(
    topology: Topology, mesh: Mapping[str, int], order: str | None, slices: str | None = None
) -> np.ndarray:
    """Returns each device's coordinates on the torus: [mesh axes .., axes of the torus].

    If there are several boxes, the last coordinate is the number of the box.
    """
    chip, axes = topology.chip, len(topology.extents)
    every = topology_devices(topology.torus, chip.kind, topology.count, chip.platform)
    devices = over_slices(every, mesh, None if topology.is_gpu else order, slices)
    has_boxes = topology.count > 1
    coords = [d.coords[:axes] + ((d.slice_index,) if has_boxes else ()) for d in devices.flat]
    return np.array(coords).reshape(*mesh.values(), -1)


def seconds(
    topology: Topology, coords: np.ndarray, mesh: Mapping[str, int], collective: Collective
) -> float:
    """Returns the seconds of one run of a collective; across boxes, of its slowest group."""
    inner = [name in collective.mesh_axes for name in mesh]
    devices = math.prod(size for size, is_in in zip(mesh.values(), inner, strict=True) if is_in)
    by_group = np.argsort([*inner, True], kind="stable")  # axes of a group come last
    groups = coords.transpose(by_group).reshape(-1, devices, coords.shape[-1])
    if collective.kind != "collective-permute":  # which has one pair of devices
        groups = groups[:, : collective.group]
    if topology.count == 1:  # all groups take the same time
        return topology.seconds(collective.kind, collective.bytes, groups[0])
    boxes = groups[..., -1] - groups[:, :1, -1]
    _, unlike = np.unique(boxes, axis=0, return_index=True)
    return max(topology.seconds(collective.kind, collective.bytes, groups[i]) for i in unlike)


def op_seconds(chip: Chip, op: OpCost) -> float:
    """Returns the seconds of all runs of an operation, from its cycles, or its FLOPs or bytes.

    A kernel takes at least the time of its exponentials.
    """
    if op.cycles is not None:
        return op.times * op.cycles / chip.clock_hz
    kernel = op.kernel or KernelWork(op.flops)
    padded = {128: kernel.flops_128, 256: kernel.flops_256}.get(chip.matrix_unit, 0.0)
    flops_s = max(op.flops, padded) / chip.peak_of(op.dtype) / chip.product_utilisation
    exponentials_s = kernel.exponentials / chip.exponentials_per_s
    return op.times * max(flops_s, exponentials_s, op.bytes / chip.memory_bandwidth)


def compute_s(chip: Chip, ops: Iterable[OpCost]) -> tuple[float, float]:
    """Returns seconds of products and of other operations."""
    products_s, other_s = 0.0, 0.0
    for op in ops:
        products_s += op_seconds(chip, op) if op.flops else 0.0
        other_s += 0.0 if op.flops else op_seconds(chip, op)
    return products_s, other_s


def traffic_seconds(
    topology: Topology, coords: np.ndarray, mesh: Mapping[str, int], traffic: Iterable[Collective]
) -> tuple[dict[str, float], dict[str, float]]:
    """Returns the seconds of traffic by mesh axes: those that compute waits for, and overlapped."""
    waits: dict[str, float] = {}
    overlapped: dict[str, float] = {}
    seconds_per_byte: dict[Collective, float] = {}  # by kind and group
    for collective in traffic:
        kind = collective._replace(bytes=1, times=1, source="", scopes="")
        if kind not in seconds_per_byte:
            seconds_per_byte[kind] = seconds(topology, coords, mesh, kind)
        axes = ",".join(name for name in mesh if name in collective.mesh_axes)
        into = overlapped if collective.overlaps else waits
        transfer_s = collective.times * collective.bytes * seconds_per_byte[kind]
        into[axes] = into.get(axes, 0.0) + transfer_s
    return waits, overlapped
