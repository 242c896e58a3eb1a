"""Computes einsums; on a CPU, over as few axes as possible.

XLA's CPU backend is fast if a product has one axis of each kind, and copies operands if it has two.
Therefore, on CPUs, axes that are adjacent in every operand are merged.  Compilers for accelerators
choose the order of axes in memory themselves, and need none of this.
"""

import math
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from layouts.reduction import like_sums, reduced_over
from layouts.shards import mesh_axes, spec_of

Operands = Sequence[Array]
OLD_TPUS = ("TPU v2", "TPU v3")  # their compiler does not support products in kernels


def einsum(equation: str, operands: Operands, place: jax.P, dtype: DTypeLike | None) -> Array:
    """Computes an einsum with the result sharded as `place`; merges axes if the mesh is of CPUs.

    The devices of the mesh decide, not those of this machine, which may only compile for them.
    """
    is_product = len(operands) > 1
    compute = merged_einsum if is_product and platform() == "cpu" else plain_einsum
    if not is_product or not any(spec_of(operand).reduced for operand in operands):
        return compute(equation, operands, place, dtype)
    operands, inner_place = align_tokens(equation, operands, place)
    return jax.sharding.reshard(compute(equation, operands, inner_place, dtype), place)


def align_tokens(equation: str, operands: Operands, place: jax.P) -> tuple[Operands, jax.P]:
    """Reshards the operands of a product with a reduced weight; also returns the result's spec.

    The weight's gradient sums over the token axes, which the weight lacks.  JAX needs them split
    over the mesh axes over which the weight is reduced, and over no others.
    """
    terms = equation.replace("->", ",").split(",")
    weight = next(i for i, operand in enumerate(operands) if spec_of(operand).reduced)
    reduced = spec_of(operands[weight]).reduced
    tokens = {
        letter: tuple(name for name in mesh_axes(entry) if name in reduced)
        for letter, entry in zip(terms[-1], place.partitions, strict=True)
        if letter not in terms[weight]
    }
    used = set().union(*tokens.values())

    def inner(axes: str, place: jax.P) -> jax.P:
        free = (tuple(n for n in mesh_axes(e) if n not in used) for e in place.partitions)
        return jax.P(*(tokens.get(*each) or None for each in zip(axes, free, strict=True)))

    def aligned(axes: str, operand: Array) -> Array:
        if (spec := spec_of(operand)).reduced:
            return reduced_over(operand, tokens.values())
        return jax.sharding.reshard(operand, inner(axes, spec))

    operands = [aligned(*each) for each in zip(terms, operands, strict=False)]
    return operands, inner(terms[-1], place)


def mesh_device() -> jax.sharding.AbstractDevice | None:
    """Returns the abstract device of the current mesh; None if the mesh has none."""
    return jax.sharding.get_abstract_mesh().abstract_device


def has_tpu_kernels() -> bool:
    """Returns whether the current mesh has TPUs whose compiler supports products in kernels."""
    device = mesh_device()
    if device is None or device.platform != "tpu":
        return False
    return not device.device_kind.startswith(OLD_TPUS)


def platform() -> str | None:
    """Returns the platform of the current mesh's devices; None if it has no devices."""
    device = mesh_device()
    return None if device is None else device.platform


def plain_einsum(equation: str, operands: Operands, place: jax.P, dtype: DTypeLike | None) -> Array:
    """Computes an einsum without merging axes."""
    if len(operands) > 1:
        return jnp.einsum(
            equation.lower(), *operands, out_sharding=place, preferred_element_type=dtype
        )
    # Resharded afterwards: on a TPU, merging axes here costs copies of what experts exchange, and
    # sends it in float32 (docs/planning.md).
    result = jnp.einsum(equation.lower(), *operands, preferred_element_type=dtype)
    return jax.sharding.reshard(result, like_sums(result, place))


def merged_einsum(
    equation: str, operands: Operands, place: jax.P, dtype: DTypeLike | None
) -> Array:
    """Computes a product over merged axes, with the result sharded as `place`."""
    inputs, out = equation.split("->")
    terms = [*inputs.split(","), out]
    places = [*(spec_of(operand).partitions for operand in operands), place.partitions]
    sizes = {
        letter: size
        for axes, operand in zip(terms, operands, strict=False)
        for letter, size in zip(axes, operand.shape, strict=True)
    }
    split = {
        letter
        for axes, entries in zip(terms, places, strict=True)
        for letter, entry in zip(axes, entries, strict=True)
        if entry is not None
    }
    groups = adjacent_letters(terms, split)
    size_of = {group[0]: math.prod(sizes[letter] for letter in group) for group in groups}
    merged_terms = ["".join(letter for letter in axes if letter in size_of) for axes in terms]
    *merged_places, merged_out = (
        jax.P(*(entries[axes.index(letter)] for letter in merged))
        for axes, entries, merged in zip(terms, places, merged_terms, strict=True)
    )
    merged_operands = [
        jax.lax.reshape(
            operand, [size_of[letter] for letter in axes], out_sharding=like_sums(operand, entries)
        )
        for operand, axes, entries in zip(operands, merged_terms[:-1], merged_places, strict=True)
    ]
    merged_equation = f"{','.join(merged_terms[:-1])}->{merged_terms[-1]}".lower()
    merged_out = merged_out.update(unreduced=place.unreduced)
    # XLA's CPU backend has native products of bfloat16 if their result is float32, but fails if it
    # must transpose that.  A single row is duplicated: alone, it takes eight times as long.
    kind, row = jnp.result_type(*operands), None
    final = dtype or kind
    wide = jnp.float32 if final == jnp.bfloat16 else dtype
    if kind == jnp.bfloat16 and not is_in_order(merged_terms):
        merged_operands = [operand.astype(jnp.float32) for operand in merged_operands]
    elif kind == jnp.bfloat16 and (row := only_row(merged_terms, size_of)):
        axis = merged_terms[0].index(row)
        merged_operands[0] = jnp.concatenate([merged_operands[0]] * 2, axis)
    result = jnp.einsum(
        merged_equation, *merged_operands, out_sharding=merged_out, preferred_element_type=wide
    ).astype(final)
    if row:
        result = jax.lax.slice_in_dim(result, 0, 1, axis=merged_terms[-1].index(row))
    return jax.lax.reshape(result, [sizes[letter] for letter in out], out_sharding=place)


def is_in_order(terms: Sequence[str]) -> bool:
    """Returns whether a product of two is a `dot_general` with leading batch axes, untransposed."""
    *operands, out = terms
    letters = dict.fromkeys("".join(operands))
    batch = "".join(x for x in letters if all(x in axes for axes in terms))
    ordered = batch + "".join(x for x in letters if x in out and x not in batch)
    return len(operands) == 2 and out == ordered and all(x.startswith(batch) for x in operands)


def only_row(terms: Sequence[str], sizes: Mapping[str, int]) -> str | None:
    """Returns an axis of size 1 if the first operand has one row for each matrix of the second."""
    (first, second), out = terms[:2], terms[-1]
    rows = [letter for letter in first if letter in out and letter not in second]
    return rows[0] if rows and all(sizes[letter] == 1 for letter in rows) else None


def adjacent_letters(terms: Sequence[str], split: set[str]) -> list[str]:
    """Groups letters that are adjacent, in the same order, in every term that has them.

    Only the first letter of a group may be split over the mesh.
    """
    groups: list[str] = []
    for letter in dict.fromkeys("".join(terms)):
        longer = groups[-1] + letter if groups else letter
        is_adjacent = all(longer in term or not set(longer) & set(term) for term in terms)
        if groups and is_adjacent and letter not in split:
            groups[-1] = longer
        else:
            groups.append(letter)
    return groups
