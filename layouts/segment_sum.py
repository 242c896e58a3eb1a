"""Sums by an integer index, on each device first, so that only the sums cross devices."""

import jax
import jax.numpy as jnp

from layouts.layout import Layout
from layouts.shards import mesh_axes, spec_of

Array = jax.Array


def segment_sum(
    layout: Layout, equation: str, data: Array, segment_ids: Array, num_segments: int
) -> Array:
    """Sums data by segment: "BJQLM,LM->RJQ" adds what has the same id in LM, for each J and Q.

    The first axis of the result counts the segments.
    """
    operands, out_axes = equation.split("->")
    axes, id_axes = operands.split(",")
    kept_axes = out_axes[1:]
    place = dict(zip(axes, spec_of(data), strict=True))
    id_place = jax.P(*(place[letter] for letter in id_axes))
    summed_over = tuple(
        name for letter in axes if letter not in kept_axes for name in mesh_axes(place[letter])
    )

    def shard_sums(data: Array, segment_ids: Array) -> Array:
        rows = jnp.einsum(f"{axes}->{id_axes}{kept_axes}".lower(), data)
        rows = rows.reshape(-1, *rows.shape[len(id_axes) :])
        sums = jax.ops.segment_sum(rows, segment_ids.reshape(-1), num_segments)
        return jax.lax.psum(sums, summed_over) if summed_over else sums

    sums = jax.shard_map(
        shard_sums,
        in_specs=(jax.P(*place.values()), id_place),
        out_specs=jax.P(None, *(place[letter] for letter in kept_axes)),
    )(data, jax.sharding.reshard(segment_ids, id_place))
    return layout.reshard(sums, out_axes)
