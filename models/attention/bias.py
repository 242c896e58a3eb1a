"""Adds a bias to the logits of attention: numbers of a table, by bucket of relative position."""

import functools
from typing import NamedTuple

import jax

from layouts.axes import Axis
from layouts.layout import Layout
from layouts.padding import with_axes
from layouts.segment_sum import segment_sum

Array = jax.Array
BUCKETS = Axis("R", "buckets", "distances of relative positions")


class Bias(NamedTuple):
    """Holds a bias of logits by relative position, and the table that it was read from.

    The gradient goes to the table alone: the values are constants.
    """

    table_RJQ: Array
    buckets: Array | None
    """Rows of the table, with axes "LM" or, with a cache, "BLM".  None in a gradient."""
    values: Array | None
    """With axes "BJQLM", where rows that share them have a B of 1.  None in a gradient."""

    def part(self, layout: Layout, queries: slice, keys: slice) -> "Bias":
        """Returns the bias of some queries and keys, which the layout does not split."""
        assert self.buckets is not None and self.values is not None
        buckets = layout.reshard(self.buckets, "BLM"[-self.buckets.ndim :])
        buckets, values = buckets[..., queries, keys], self.values[..., queries, keys]
        return Bias(self.table_RJQ, buckets, values)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def add_bias(layout: Layout, logits_BJQLM: Array, bias: Bias) -> Array:
    """Adds the bias to the logits."""
    return _add_forward(layout, logits_BJQLM, bias)[0]


def _add_forward(layout: Layout, logits_BJQLM: Array, bias: Bias) -> tuple[Array, Bias]:
    assert bias.values is not None
    return logits_BJQLM + bias.values, bias._replace(values=None)


add_bias.defvjp(
    _add_forward, lambda layout, bias, dlogits: (dlogits, bias_gradient(layout, bias, dlogits))
)


def bias_gradient(layout: Layout, bias: Bias, dlogits_BJQLM: Array) -> Bias:
    """Returns the gradient of a bias: sums into buckets before devices add them up.

    One number per head and bucket crosses devices, instead of one per head, query and key.
    """
    assert bias.buckets is not None
    layout = with_axes(layout, BUCKETS)
    equation = f"BJQLM,{'BLM'[-bias.buckets.ndim :]}->RJQ"
    count = bias.table_RJQ.shape[0]
    return Bias(segment_sum(layout, equation, dlogits_BJQLM, bias.buckets, count), None, None)
