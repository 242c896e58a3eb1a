"""Devices that share one machine's cores and memory: what they do at their best, measured."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding

from layouts.cost.collectives import Collective
from layouts.cost.jaxpr_cost import OpCost
from layouts.cost.step_time import Timing

SIDE = 512  # of the products that are timed
ELEMENTS = 2**20  # that each device reads and writes
FEW = 16  # elements of a sum that takes no longer than its start
STEPS = 16  # operations on each element, which a compiler fuses
ROUNDS = 5


class HostRates(NamedTuple):
    """Rates of all devices of a machine together, when all work at once."""

    devices: int
    flops_per_s: float
    """Of matrix products."""
    bytes_per_s: float
    """Read and written."""
    elements_per_s: float
    """Results of elementwise operations, fused."""
    collective_s: float
    """Until all devices have met, whatever they exchange."""
    received_per_s: float
    """Bytes that all devices together receive from each other."""


def measure_host(devices: Sequence[jax.Device]) -> HostRates:
    """Times a product, a copy, a chain of operations and two sums on all devices at once."""
    count = len(devices)
    mesh = Mesh(np.array(devices), ("all",), axis_types=(AxisType.Explicit,))

    def seconds(function: Callable[[jax.Array], jax.Array], *shape: int) -> float:
        """Of a function of each device's own numbers."""
        with jax.set_mesh(mesh):
            split = NamedSharding(mesh, jax.P("all"))
            given = jax.device_put(np.ones((count, *shape), np.float32), split)
            place = jax.P("all")
            own = jax.shard_map(function, in_specs=place, out_specs=place, check_vma=False)
            each = jax.jit(own)
            return best(lambda: each(given).block_until_ready())

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
    held, sum_bytes = count * ELEMENTS, 2 * 4 * ELEMENTS * (count - 1)
    return HostRates(
        devices=count,
        flops_per_s=count * 2 * SIDE**3 / product_s,
        bytes_per_s=2 * 4 * held / copied_s,
        elements_per_s=2 * STEPS * held / max(chained_s, copied_s),
        collective_s=max(collective_s, 0.0),
        received_per_s=sum_bytes / max(summed_s, copied_s),
    )


def best(function: Callable[[], object]) -> float:
    """The least of some times, once what is timed is compiled."""
    function()
    found = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        function()
        found.append(time.perf_counter() - start)
    return min(found)


def estimate_host_timing(
    host: HostRates,
    mesh: Mapping[str, int],
    work: Iterable[OpCost],
    collectives: Iterable[Collective],
) -> Timing:
    """How long a step takes: the devices take turns at what they share, so their work adds up."""
    products_s, other_s, traffic = 0.0, 0.0, dict[str, float]()
    for own in work:
        products_s += host.devices * own.times * own.flops / host.flops_per_s
        moved_s = own.bytes / host.bytes_per_s + own.elements / host.elements_per_s
        other_s += host.devices * own.times * moved_s
    for sent in collectives:
        axes = ",".join(name for name in mesh if name in sent.mesh_axes)
        received_s = host.devices * sent.received_bytes / host.received_per_s
        traffic[axes] = traffic.get(axes, 0.0) + sent.times * host.collective_s + received_s
    return Timing(products_s, other_s, traffic, {})
