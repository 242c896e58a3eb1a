"""Measures the peak rates of devices that share one machine's cores and memory."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding

from layouts.cost.jaxpr_cost import WorkCounts
from layouts.cost.step_time import Timing

SIDE = 512  # of the products that are timed
ELEMENTS = 2**20  # that each device reads and writes
FEW = 16  # elements, so few that only the fixed cost of an operation is timed
STEPS = 16  # operations on each element, which a compiler fuses
ROUNDS = 5


class HostRates(NamedTuple):
    """Holds the rates of all devices of a machine together, when all work at once."""

    devices: int
    flops_per_s: float
    """Of matrix products."""
    bytes_per_s: float
    """Read and written."""
    elements_per_s: float
    """Results of elementwise operations, fused."""
    collective_s: float
    """The fixed time of a collective, however much it exchanges."""
    received_per_s: float
    """Bytes that all devices together receive from each other."""


def measure_host(devices: Sequence[jax.Device]) -> HostRates:
    """Times a product, a copy, elementwise operations and two sums on all devices at once."""
    count = len(devices)
    mesh = Mesh(np.array(devices), ("all",), axis_types=(AxisType.Explicit,))

    def seconds(function: Callable[[jax.Array], jax.Array], *shape: int) -> float:
        """Returns the time of the fastest call of a function of each device's shard."""
        with jax.set_mesh(mesh):
            split = NamedSharding(mesh, jax.P("all"))
            operand = jax.device_put(np.ones((count, *shape), np.float32), split)
            spec = jax.P("all")
            mapped = jax.shard_map(function, in_specs=spec, out_specs=spec, check_vma=False)
            compiled, times_s = jax.jit(mapped), list[float]()
            compiled(operand).block_until_ready()
            for _ in range(ROUNDS):
                start = time.perf_counter()
                compiled(operand).block_until_ready()
                times_s.append(time.perf_counter() - start)
            return min(times_s)

    def chain(x: jax.Array) -> jax.Array:
        for _ in range(STEPS):
            x = x * 0.5 + 1.0
        return x

    def total(x: jax.Array) -> jax.Array:
        return jax.lax.psum(x, "all")

    start_s = seconds(lambda x: x + 1.0, FEW)
    copied_s = seconds(lambda x: x + 1.0, ELEMENTS) - start_s
    product_s = seconds(lambda x: jnp.matmul(x, x), SIDE, SIDE) - start_s
    chained_s = seconds(chain, ELEMENTS) - start_s
    collective_s = seconds(total, FEW) - start_s
    summed_s = seconds(total, ELEMENTS) - start_s - collective_s
    elements, sum_bytes = count * ELEMENTS, 2 * 4 * ELEMENTS * (count - 1)
    return HostRates(
        devices=count,
        flops_per_s=count * 2 * SIDE**3 / product_s,
        bytes_per_s=2 * 4 * elements / copied_s,
        elements_per_s=2 * STEPS * elements / max(chained_s, copied_s),
        collective_s=max(collective_s, 0.0),
        received_per_s=sum_bytes / max(summed_s, copied_s),
    )


def estimate_host_timing(host: HostRates, mesh: Mapping[str, int], work: WorkCounts) -> Timing:
    """Estimates a step on devices that share a host's rates, so that their times add up."""
    products_s, other_s, traffic = 0.0, 0.0, dict[str, float]()
    for op in work.ops:
        products_s += host.devices * op.times * op.flops / host.flops_per_s
        moved_s = op.bytes / host.bytes_per_s + op.elements / host.elements_per_s
        other_s += host.devices * op.times * moved_s
    for collective in work.collectives:
        axes = ",".join(name for name in mesh if name in collective.mesh_axes)
        received_s = host.devices * collective.received_bytes / host.received_per_s
        traffic[axes] = traffic.get(axes, 0.0) + collective.times * host.collective_s + received_s
    return Timing(products_s, other_s, traffic, {})
