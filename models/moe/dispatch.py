"""Ways to bring tokens to their experts and back.  Same routing in, same result out.

Each takes tokens, their routing, the places of an expert, and the experts; it returns what the
experts made of each token, weighted by its gates.
"""

import functools
from typing import Protocol

import jax
import jax.numpy as jnp

from layouts.layout import Layout, num_shards
from models.moe.routing import Routing, buffer_positions

Array = jax.Array
BLOCK = 128  # tokens of one expert that a grouped product takes at a time, where there are more


class Experts(Protocol):
    """The feed-forward layers that tokens are sent to."""

    layout: Layout
    count: int

    def run(self, x_EGCD: Array) -> Array:
        """The output of each expert for its own tokens."""

    def run_blocks(self, x_Glcd: Array, expert_Gl: Array) -> Array:
        """The output for blocks of tokens, each block for one expert."""


def by_einsum(experts: Experts, x_GSD: Array, routing: Routing, capacity: int) -> Array:
    """Products with one-hot masks.  Lepikhin et al. 2020 (GShard), algorithm 2."""
    einsum, iota = experts.layout.einsum, experts.layout.iota
    shape = routing.kept_GSI.shape
    kept_GSI1 = routing.kept_GSI[..., None]
    expert_GSIe = iota("GSIe", (*shape, experts.count), "e") == routing.expert_GSI[..., None]
    place_GSIC = iota("GSIC", (*shape, capacity), "C") == routing.place_GSI[..., None]
    expert_GSIe = jnp.where(kept_GSI1 & expert_GSIe, 1, 0).astype(x_GSD.dtype)
    place_GSIC = place_GSIC.astype(x_GSD.dtype)
    sent_GSeC = einsum("GSIe,GSIC->GSeC", expert_GSIe, place_GSIC)
    weights_GSIe = expert_GSIe * routing.gate_GSI[..., None].astype(x_GSD.dtype)
    combine_GSeC = einsum("GSIe,GSIC->GSeC", weights_GSIe, place_GSIC)

    x_GeCD = einsum("GSeC,GSD->GeCD", sent_GSeC, x_GSD)
    y_GeCD = exchange_with_experts(experts, x_GeCD)
    return einsum("GSeC,GeCD->GSD", combine_GSeC, y_GeCD)


def by_gather(experts: Experts, x_GSD: Array, routing: Routing, capacity: int) -> Array:
    """Each place reads its token, and each token its places; nothing is multiplied by zero."""
    layout, (groups, _, d_model) = experts.layout, x_GSD.shape
    slots = experts.count * capacity
    slot_GSI = routing.expert_GSI * capacity + routing.place_GSI
    slot_GSI = jnp.where(routing.kept_GSI, slot_GSI, slots)
    x_GCD, back = to_slots(layout, x_GSD, slot_GSI, slots)
    shape = (groups, experts.count, capacity, d_model)
    x_GeCD = layout.reshape(x_GCD, shape, "GeCD")
    y_GeCD = exchange_with_experts(experts, x_GeCD)
    y_GCD = layout.reshape(y_GeCD, x_GCD.shape, "GCD")
    return combine(layout, y_GCD, slot_GSI, back, routing.gate_GSI)


def dropless(experts: Experts, x_GSD: Array, routing: Routing, capacity: int) -> Array:
    """Grouped products: each expert has as many blocks of places as it needs.

    Tokens stay on their devices, and the experts' weights come to them.  Gale et al. 2022
    (MegaBlocks).
    """
    layout, choices = experts.layout, routing.kept_GSI.shape[-1]
    # All tokens of a device are one group.
    devices = num_shards(layout.place("G")[0])
    tokens = x_GSD.shape[0] * x_GSD.shape[1] // devices

    def regroup(x: Array, axes: str) -> Array:
        return layout.reshape(x, (devices, tokens, *x.shape[2:]), axes)

    own_GSD = regroup(x_GSD, "GSD")
    expert_GSI, kept_GSI, gate_GSI = (
        regroup(x, "GSI") for x in (routing.expert_GSI, routing.kept_GSI, routing.gate_GSI)
    )
    size = min(BLOCK, tokens * choices)
    blocks = -(-tokens * choices // size) + experts.count
    slots = blocks * size
    place_GSI = buffer_positions(layout, expert_GSI, kept_GSI, experts.count)
    shape = (*expert_GSI.shape, experts.count)
    chosen_GSIe = layout.iota("GSIe", shape, "e") == expert_GSI[..., None]
    chosen_GSIe &= kept_GSI[..., None]
    blocks_Ge = -(-jnp.sum(chosen_GSIe, axis=(1, 2)) // size)  # in blocks
    ends_Ge = jnp.cumsum(blocks_Ge, axis=-1)
    first_Ge = ends_Ge - blocks_Ge
    first_GSI = jnp.sum(jnp.where(chosen_GSIe, first_Ge[:, None, None], 0), axis=-1)
    slot_GSI = jnp.where(kept_GSI, first_GSI * size + place_GSI, slots)
    block_Gle = layout.iota("Gle", (devices, blocks, experts.count), "l")
    expert_Gl = jnp.sum(block_Gle >= ends_Ge[:, None], axis=-1)
    expert_Gl = jnp.minimum(expert_Gl, experts.count - 1)

    x_GCD, back = to_slots(layout, own_GSD, slot_GSI, slots)
    shape = (devices, blocks, size, x_GSD.shape[-1])
    x_Glcd = layout.reshape(x_GCD, shape, "Glcd")
    y_Glcd = experts.run_blocks(x_Glcd, expert_Gl)
    y_GCD = layout.reshape(y_Glcd, x_GCD.shape, "GCD")
    y_GSD = combine(layout, y_GCD, slot_GSI, back, gate_GSI)
    return layout.reshape(y_GSD, x_GSD.shape, "GSD")


KINDS = {"einsum": by_einsum, "gather": by_gather, "dropless": dropless}


def exchange_with_experts(experts: Experts, x_GeCD: Array) -> Array:
    """Moves tokens to the experts' devices by one all-to-all, runs them, and moves them back."""
    layout = experts.layout
    x_EGCD = layout.einsum("GECD->EGCD", layout.reshard(x_GeCD, "GECD"))
    y_GECD = layout.einsum("EGCD->GECD", experts.run(x_EGCD))
    return layout.reshard(y_GECD, "GeCD")


def to_slots(layout: Layout, x_GSD: Array, slot_GSI: Array, slots: int) -> tuple[Array, Array]:
    """Copies tokens to their slots, zeros to empty ones; returns also the choice at each slot.

    Choices are counted through: choice i of token s is s x I + i.
    """
    here_GC = choice_at_slot(layout, slot_GSI, slots)
    return _to_slots(layout, x_GSD, slot_GSI, here_GC), here_GC


def choice_at_slot(layout: Layout, slot_GSI: Array, slots: int) -> Array:
    """Returns the choice at each slot; at empty slots, the number of choices."""

    def own(slot_GSI: Array) -> Array:
        groups = slot_GSI.shape[0]
        slot_GS = slot_GSI.reshape(groups, -1)
        choices = slot_GS.shape[1]
        group_G1 = jnp.arange(groups)[:, None]
        none_GC = jnp.full((groups, slots), choices, jnp.int32)
        return none_GC.at[group_G1, slot_GS].set(jnp.arange(choices, dtype=jnp.int32), mode="drop")

    place = layout.place("GSI")
    return jax.shard_map(own, in_specs=place, out_specs=jax.P(*place[:2]), check_vma=False)(
        slot_GSI
    )


def rows(layout: Layout, x_GSD: Array, index_GC: Array) -> Array:
    """Gathers rows of each group by index, zeros where an index is beyond the last."""
    inside_GC1 = (index_GC < x_GSD.shape[1])[:, :, None]
    return jnp.where(inside_GC1, layout.take_along_axis(x_GSD, index_GC, "GSD"), 0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _to_slots(layout: Layout, x_GSD: Array, slot_GSI: Array, here_GC: Array) -> Array:
    return rows(layout, x_GSD, here_GC // slot_GSI.shape[-1])


def _to_slots_forward(
    layout: Layout, x_GSD: Array, slot_GSI: Array, here_GC: Array
) -> tuple[Array, Array]:
    return _to_slots(layout, x_GSD, slot_GSI, here_GC), slot_GSI


def _to_slots_backward(layout: Layout, slot_GSI: Array, dx_GCD: Array) -> tuple:
    """Gathers, where the gradient of a gather would scatter: each token knows its slots."""
    choices = range(slot_GSI.shape[-1])
    return sum(rows(layout, dx_GCD, slot_GSI[:, :, i]) for i in choices), None, None


_to_slots.defvjp(_to_slots_forward, _to_slots_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def combine(
    layout: Layout, y_GCD: Array, slot_GSI: Array, here_GC: Array, gate_GSI: Array
) -> Array:
    """Sums what is at each token's slots, times its gates."""
    parts = [
        gate_GSI[:, :, i, None].astype(y_GCD.dtype) * rows(layout, y_GCD, slot_GSI[:, :, i])
        for i in range(slot_GSI.shape[-1])
    ]
    return sum(parts[1:], parts[0])


def _combine_forward(
    layout: Layout, y_GCD: Array, slot_GSI: Array, here_GC: Array, gate_GSI: Array
) -> tuple[Array, tuple[Array, ...]]:
    residuals = (y_GCD, slot_GSI, here_GC, gate_GSI)
    return combine(layout, *residuals), residuals


def _combine_backward(layout: Layout, residuals: tuple[Array, ...], dy_GSD: Array) -> tuple:
    y_GCD, slot_GSI, here_GC, gate_GSI = residuals
    groups, tokens, choices = gate_GSI.shape
    gate_GS = layout.reshape(gate_GSI, (groups, tokens * choices), "GS")
    gate_GC = rows(layout, gate_GS[..., None], here_GC).astype(dy_GSD.dtype)
    dy_GCD = gate_GC * rows(layout, dy_GSD, here_GC // choices)
    wide_GSD = dy_GSD.astype(jnp.float32)
    dgates = [
        jnp.sum(wide_GSD * rows(layout, y_GCD, slot_GSI[:, :, i]), axis=-1) for i in range(choices)
    ]
    return dy_GCD, None, None, jnp.stack(dgates, axis=-1)


combine.defvjp(_combine_forward, _combine_backward)
