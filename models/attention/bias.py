"""Adds a bias to the logits of attention, from a table by bucket of relative position."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from layouts.axes import Axis
from layouts.layout import Layout
from layouts.padding import with_axes
from layouts.shards import mesh_axes, spec_of

BUCKETS = Axis("R", "buckets", "distances of relative positions")


class Bias(NamedTuple):
    """Holds a bias of logits by relative position, and the table that it comes from.

    Only the table has a gradient: the values are constants.
    """

    table_RJQ: Array
    buckets: Array | None
    """Indices into the table, with axes "LM" or, with a cache, "BLM".  None in a gradient."""
    values: Array | None
    """With axes "BJQLM"; B has size 1 if rows share the values.  None in a gradient."""

    def part(self, layout: Layout, queries: slice, keys: slice) -> "Bias":
        """Returns the bias of some queries and keys, which the layout does not split."""
        assert self.buckets is not None and self.values is not None
        buckets = layout.reshard(self.buckets, "BLM"[-self.buckets.ndim :])
        buckets, values = buckets[..., queries, keys], self.values[..., queries, keys]
        return Bias(self.table_RJQ, buckets, values)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def add_bias(layout: Layout, logits_BJQLM: Array, bias: Bias) -> Array:
    """Adds the bias to the logits."""
    assert bias.values is not None
    return logits_BJQLM + bias.values


add_bias.defvjp(
    lambda layout, logits, bias: (add_bias(layout, logits, bias), bias._replace(values=None)),
    lambda layout, bias, dlogits: (dlogits, bias_gradient(layout, bias, dlogits)),
)


def bias_gradient(layout: Layout, bias: Bias, dlogits_BJQLM: Array) -> Bias:
    """Returns the gradient of a bias, summed by bucket before devices add up their sums.

    Devices exchange one number per head and bucket, instead of one per head, query and key.
    """
    assert bias.buckets is not None
    place = dict(zip("BJQLM", spec_of(dlogits_BJQLM), strict=True))
    id_axes, count = "BLM"[-bias.buckets.ndim :], len(bias.table_RJQ)
    id_place = jax.P(*(place[letter] for letter in id_axes))
    summed_over = tuple(name for letter in "BLM" for name in mesh_axes(place[letter]))

    def shard_sums(data: Array, buckets: Array) -> Array:
        rows = jnp.einsum(f"bjqlm->{id_axes.lower()}jq", data)
        rows = rows.reshape(-1, *rows.shape[len(id_axes) :])
        sums = jax.ops.segment_sum(rows, buckets.ravel(), count)
        return jax.lax.psum(sums, summed_over) if summed_over else sums

    sums_RJQ = jax.shard_map(
        shard_sums,
        in_specs=(jax.P(*place.values()), id_place),
        out_specs=jax.P(None, place["J"], place["Q"]),
    )(dlogits_BJQLM, jax.sharding.reshard(bias.buckets, id_place))
    return Bias(with_axes(layout, BUCKETS).reshard(sums_RJQ, "RJQ"), None, None)
