"""Products over as few axes as possible: axes that always stand together are taken as one.

XLA's CPU backend is fast where a product has one axis of each kind, and copies operands where it
has two.  Elsewhere this makes no difference to a product.
"""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

Array = jax.Array


def groups(terms: Sequence[str], split: set[str]) -> list[str]:
    """The letters of the terms, grouped where they stand together, in order, in every term.

    Only the first letter of a group may be split over the mesh.

    >>> groups(["BLD", "DJQK", "BLJQK"], split={"B", "J"})
    ['BL', 'D', 'JQK']
    """
    found: list[str] = []
    for letter in dict.fromkeys("".join(terms)):
        longer = found[-1] + letter if found else letter
        whole = all(longer in term or not set(longer) & set(term) for term in terms)
        if found and whole and letter not in split:
            found[-1] = longer
        else:
            found.append(letter)
    return found


def einsum(
    equation: str, operands: Sequence[Array], place: jax.P, dtype: DTypeLike | None
) -> Array:
    """`jnp.einsum` over merged axes, its result placed so.

    One operand, which is only turned or summed, keeps its axes: for a TPU, merging them costs
    copies of what experts exchange, and sends it in float32 (docs/planning.md).
    """
    inputs, out = equation.split("->")
    if len(operands) == 1:
        result = jnp.einsum(equation.lower(), *operands, preferred_element_type=dtype)
        return jax.sharding.reshard(result, place)
    terms = [*inputs.split(","), out]
    places = [*(jax.typeof(operand).sharding.spec for operand in operands), place]
    sizes = {
        letter: size
        for axes, operand in zip(terms, operands, strict=False)
        for letter, size in zip(axes, operand.shape, strict=True)
    }
    split = {
        letter
        for axes, over in zip(terms, places, strict=True)
        for letter, mesh_axis in zip(axes, over, strict=True)
        if mesh_axis is not None
    }
    size_of = {
        group[0]: math.prod(sizes[letter] for letter in group) for group in groups(terms, split)
    }

    merged = []
    for axes, over in zip(terms, places, strict=True):
        firsts = [letter for letter in axes if letter in size_of]
        merged.append(("".join(firsts), jax.P(*(over[axes.index(letter)] for letter in firsts))))
    flat = [
        jax.lax.reshape(operand, [size_of[letter] for letter in axes], out_sharding=over)
        for operand, (axes, over) in zip(operands, merged, strict=False)
    ]
    result = jnp.einsum(
        (",".join(axes for axes, _ in merged[:-1]) + "->" + merged[-1][0]).lower(),
        *flat,
        out_sharding=merged[-1][1],
        preferred_element_type=dtype,
    )
    return jax.lax.reshape(result, [sizes[letter] for letter in out], out_sharding=place)
