"""Restricts sampling to the nucleus: the likeliest tokens that hold a share of the probability.

Holtzman et al. 2019, section 3.1.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from layouts.layout import Layout

Array = jax.Array


def nucleus_of_sorted(layout: Layout, sorted_BWU: Array, top_p: float | Array) -> Array:
    """Masks logits, sorted from the largest, outside the nucleus; the first always stays."""
    share_BWU = jax.nn.softmax(sorted_BWU, axis=-1)
    before_BWU = layout.cumsum(share_BWU, "BWU") - share_BWU
    rank_BWU = layout.iota("BWU", sorted_BWU.shape, "U")
    return jnp.where((before_BWU < top_p) | (rank_BWU == 0), sorted_BWU, -jnp.inf)


def nucleus(layout: Layout, logits_BWV: Array, top_p: float | Array) -> Array:
    """Masks logits outside the nucleus, without sorting them; among equals the first stays.

    A token belongs to it where the tokens ahead of it hold less than top_p.  Two bisections find
    the smallest logit that belongs and the last token among its equals; all that they need are
    sums over the vocabulary, which may be split.
    """
    top_p = jnp.maximum(top_p, float(jnp.finfo(jnp.float32).tiny))  # the first always stays
    share_BWV = jax.nn.softmax(logits_BWV, axis=-1)
    key_BWV = ordered_integers(logits_BWV)
    id_BWV = layout.iota("BWV", logits_BWV.shape, "V")

    def mass_above(key_BW1: Array) -> Array:
        return jnp.sum(jnp.where(key_BWV > key_BW1, share_BWV, 0), axis=-1, keepdims=True)

    limits = (jnp.min(key_BWV, axis=-1, keepdims=True), jnp.max(key_BWV, axis=-1, keepdims=True))
    cut_BW1 = first_true(lambda key_BW1: mass_above(key_BW1) < top_p, *limits)
    tied_BWV = key_BWV == cut_BW1

    def tied_up_to(last_BW1: Array) -> Array:
        return jnp.sum(jnp.where(tied_BWV & (id_BWV <= last_BW1), 1.0, 0), axis=-1, keepdims=True)

    end_BW1 = jnp.full_like(cut_BW1, logits_BWV.shape[-1] - 1)
    tied_BW1 = tied_up_to(end_BW1)
    share_BW1 = jnp.max(jnp.where(tied_BWV, share_BWV, 0), axis=-1, keepdims=True)
    room_BW1 = jnp.ceil((top_p - mass_above(cut_BW1)) / share_BW1)
    kept_BW1 = jnp.minimum(room_BW1, tied_BW1)
    start_BW1 = jnp.where(kept_BW1 < tied_BW1, 0, end_BW1)  # mostly all stay: nothing to search
    last_BW1 = first_true(lambda id_BW1: tied_up_to(id_BW1) >= kept_BW1, start_BW1, end_BW1)
    inside_BWV = (key_BWV > cut_BW1) | (tied_BWV & (id_BWV <= last_BW1))
    return jnp.where(inside_BWV, logits_BWV, -jnp.inf)


def ordered_integers(x: Array) -> Array:
    """Returns integers in the order of the floats x.

    >>> x = jnp.array([-jnp.inf, -2.0, -0.0, 0.0, 1e-9, 3.0])
    >>> [int(step) for step in jnp.sign(jnp.diff(ordered_integers(x)))]
    [1, 1, 0, 1, 1]
    """
    x = jnp.where(x == 0, 0.0, x.astype(jnp.float32))  # -0 is not below 0
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    return jnp.where(bits < 0, bits ^ jnp.int32(0x7FFFFFFF), bits)


def first_true(is_true: Callable[[Array], Array], low: Array, high: Array) -> Array:
    """Returns the smallest integers from `low` on for which it is true; it is for `high`."""

    def halve(bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = (low & high) + ((low ^ high) >> 1)  # the mean, without overflow
        below = is_true(middle)
        return jnp.where(below, low, jnp.minimum(middle + 1, high)), jnp.where(below, middle, high)

    return jax.lax.while_loop(lambda bounds: jnp.any(bounds[0] < bounds[1]), halve, (low, high))[1]
