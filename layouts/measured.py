"""What this machine's CPU devices reach, measured in a fraction of a second."""

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

SIDE = 512  # of the matrices that are multiplied
MOVED_BYTES = 4 * 2**20  # of the array that is read and written
TIMES = 5


class Rates(NamedTuple):
    """Of each device, while all of them work."""

    flops_per_s: float
    """In products of large float32 matrices."""
    bytes_per_s: float
    """Read and written by arithmetic on a large array."""


def rates(mesh: Mesh) -> Rates:
    """Runs a product and a sum on every device at once, a few times each."""
    split, devices = NamedSharding(mesh, jax.P(mesh.axis_names)), mesh.devices.size
    with jax.set_mesh(mesh):

        def ones(*shape: int) -> jax.Array:
            return jax.jit(lambda: jnp.ones((devices, *shape), out_sharding=split))()

        def product(x: jax.Array) -> jax.Array:
            return jnp.einsum("nij,njk->nik", x, x, out_sharding=split)

        flops, moved = 2 * SIDE**3, 2 * MOVED_BYTES
        return Rates(
            flops / median_s(product, ones(SIDE, SIDE)),
            moved / median_s(lambda x: 2 * x + 1, ones(MOVED_BYTES // 4)),
        )


def median_s(function: Callable[[jax.Array], jax.Array], x: jax.Array) -> float:
    """Seconds of a call in the middle of a few; the first compiles and is not counted."""
    own, times = jax.jit(function), []
    own(x).block_until_ready()
    for _ in range(TIMES):
        start = time.perf_counter()
        own(x).block_until_ready()
        times.append(time.perf_counter() - start)
    return statistics.median(times)
