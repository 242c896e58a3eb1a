"""Draws random bytes that do not depend on their sharding."""

import functools

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.random import threefry_2x32

from layouts.layout import Layout
from layouts.shards import mesh_axes, num_shards, shard_index

BYTES = 4  # in one random number
BLOCK_BYTES = 2 * BYTES  # of two numbers, which the generator makes at a time


def random_bytes(key: Array, *, shape: tuple[int, ...], out_sharding: jax.P) -> Array:
    """Draws uniform integers from 0 to 255, four from each random number."""
    numbers = -(-shape[-1] // BYTES)
    # If a device would hold only a part of a number, each draws full rows and keeps its part.
    even = shape[-1] % (BYTES * num_shards(out_sharding[-1])) == 0
    place = out_sharding if even else jax.P(*out_sharding[:-1], None)
    drawn = jax.random.bits(key, (*shape[:-1], numbers), jnp.uint32, out_sharding=place)
    parts = jax.lax.bitcast_convert_type(drawn, jnp.uint8)
    spread = jax.lax.reshape(parts, (*shape[:-1], numbers * BYTES), out_sharding=place)
    return jax.sharding.reshard(spread[..., : shape[-1]], out_sharding)


def random_bytes_of_rows(layout: Layout, seed: Array, rows: Array, axes: str, width: int) -> Array:
    """Draws `width` bytes, along the last of these axes, for each row id in `rows`.

    The bytes of a row depend only on the seed and its id, not on its device.
    """
    over = mesh_axes(layout.place(axes)[-1])
    shard = functools.partial(random_bytes_of_shard, width=width // num_shards(over), over=over)
    # Rematerialised: a scan over layers would hoist what needs no operand into a `shard_map`
    # without operands, at which XLA aborts inside the stages of a pipeline (jax 0.10.2).
    draw = jax.checkpoint(shard)
    return layout.shard_map(draw, f"s,{axes[:-1]}({axes[-1]})->{axes}")(seed, rows)


def random_bytes_of_shard(seed: Array, rows: Array, *, width: int, over: tuple[str, ...]) -> Array:
    """Draws the `width` bytes of each row in a device's shard; mesh axes `over` split each row.

    Byte f of row i comes from the generator's block (i, f // 8).
    """
    start = shard_index(over) * width
    aligned = width % BLOCK_BYTES == 0
    blocks = width // BLOCK_BYTES if aligned else width // BLOCK_BYTES + 2
    shape = (*rows.shape, blocks)
    block = jax.lax.broadcasted_iota(jnp.uint32, shape, len(shape) - 1)
    block += (start // BLOCK_BYTES).astype(jnp.uint32)
    row = jnp.broadcast_to(rows[..., None].astype(jnp.uint32), shape)
    drawn = threefry_2x32(seed, jnp.stack([row, block]))  # encrypts pairs of these two
    spread = jax.lax.bitcast_convert_type(jnp.moveaxis(drawn, 0, -1), jnp.uint8)
    spread = spread.reshape(*rows.shape, blocks * BLOCK_BYTES)
    if aligned:
        return spread
    return jax.lax.dynamic_slice_in_dim(spread, start % BLOCK_BYTES, width, axis=-1)
