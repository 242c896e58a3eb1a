"""Sends tokens to their experts and back, in several ways that give the same result.

Each accepts tokens, their routing and the experts, and returns the outputs of the experts for each
token, weighted by its gates.

The choices of all tokens are numbered, groups and tokens in order.  This number is the id of a
choice: it determines the bits of dropout, wherever the choice is sent.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from layouts.layout import Layout
from layouts.quantized import Operand, Quantized
from layouts.random_bytes import random_bytes_of_rows, random_bytes_of_shard
from layouts.reduction import reduced_over
from layouts.shards import gather_shard, is_gatherable, mesh_axes, num_shards, shard_index, spec_of
from models.dropout import Key, drop
from models.feed_forward.mlp import Mlp
from models.feed_forward.moe import grouped_matmul
from models.feed_forward.moe.exchange import Exchange
from models.feed_forward.moe.grouped_matmul import block_tokens, gated_product, grouped_product
from models.feed_forward.moe.routing import Router, Routing

Weight = Array | Operand
Product = Callable[..., Array]  # of tokens and weights
Draw = Callable[..., Array]  # draws `width` random bytes for each token


class Experts(NamedTuple):
    """Computes the experts of a layer, for all ways to dispatch."""

    layout: Layout
    expert: Mlp
    num_experts: int
    weights: Mapping[str, Weight]
    rate: float
    key: Key
    hidden_axes: tuple[str, ...] = ()
    """Mesh axes that split F if weights are shards: outputs are partial sums over them."""

    @property
    def has_dropout(self) -> bool:
        """Returns whether the experts draw random bytes, which needs the ids of choices."""
        return self.key is not None and self.rate > 0

    @property
    def seed(self) -> Array:
        zero = jnp.zeros(2, jnp.uint32)
        return zero if self.key is None else jax.random.bits(self.key, (2,), jnp.uint32)

    def run(self, x_EGcD: Array, id_EGc: Array | None) -> Array:
        """Returns the output of each expert for its tokens."""

        def product(equation: str, x: Array, weight: Any, bias: Array | None) -> Array:
            y = self.layout.einsum(equation, x, weight)
            if bias is None:
                return y
            axes = equation.partition("->")[2]
            return y + self.layout.broadcast_like(bias.astype(y.dtype), f"E{axes[-1]}", axes)

        into = functools.partial(product, "EGcD,EDF->EGcF")
        out = functools.partial(product, "EGcF,EFD->EGcD")
        draw = None
        if id_EGc is not None:
            draw = functools.partial(random_bytes_of_rows, self.layout, self.seed, id_EGc, "EGcF")
        return self._run(x_EGcD, into, out, draw)

    def run_blocks(self, x_lcd: Array, gate_lc: Array, expert_l: Array, draw: Draw) -> Array:
        """Returns the output for a device's blocks of tokens, each block for one expert.

        The weights are the device's shards; it draws random bytes for its shard of F.
        """

        def product(multiply: Product, x: Array, weight: Weight, *gates: Array) -> Array:
            if not isinstance(weight, Quantized):
                return multiply(x, weight.astype(x.dtype), expert_l, *gates)
            scale_l1f = weight.scale.at[expert_l].get(mode="clip")
            y_lcf = multiply(x, weight.values, expert_l, *gates)
            return (y_lcf.astype(scale_l1f.dtype) * scale_l1f).astype(x.dtype)

        def bias_l1f(bias: Array) -> Array:  # a product, so that its gradient is one, too
            of_expert_le = jax.nn.one_hot(expert_l, len(bias), dtype=x_lcd.dtype)
            return (of_expert_le @ bias.astype(x_lcd.dtype))[:, None]

        def into(x: Array, weight: Weight, bias: Array | None) -> Array:
            h = product(grouped_product, x, weight)
            return h if bias is None else h + bias_l1f(bias)

        def out(h: Array, weight: Weight, bias: Array | None) -> Array:
            y = product(gated_product, h, weight, gate_lc)
            if bias is None:
                return y
            is_first = shard_index(self.hidden_axes) == 0
            term = jnp.where(is_first, gate_lc[..., None].astype(y.dtype), 0) * bias_l1f(bias)
            return y + term

        return self._run(x_lcd, into, out, draw if self.has_dropout else None)

    def _run(self, x: Array, into: Product, out: Product, draw: Draw | None) -> Array:
        weights = self.weights
        gate = into(x, weights["wg_EDF"], weights.get("bg_EF")) if self.expert.gated else None
        h = self.expert.activate(into(x, weights["wi_EDF"], weights.get("bi_EF")), gate)
        if draw is not None:
            h = drop(h, draw(width=h.shape[-1]), self.rate)
        return out(h, weights["wo_EFD"], weights.get("bo_ED"))


def by_einsum(experts: Experts, x_GsD: Array, routing: Routing, capacity: int) -> Array:
    """Dispatches by products with one-hot masks.  Lepikhin et al. 2020 (GShard), algorithm 2."""
    einsum, iota = experts.layout.einsum, experts.layout.iota
    shape = routing.kept_Gsi.shape
    kept_Gsi1 = routing.kept_Gsi[..., None]
    with jax.named_scope("dispatch"):
        of_expert = routing.expert_Gsi[..., None]
        expert_Gsie = iota("Gsie", (*shape, experts.num_experts), "e") == of_expert
        position_Gsic = iota("Gsic", (*shape, capacity), "c") == routing.position_Gsi[..., None]
        expert_Gsie = jnp.where(kept_Gsi1 & expert_Gsie, 1, 0).astype(x_GsD.dtype)
        position_Gsic = position_Gsic.astype(x_GsD.dtype)
        sent_Gsec = einsum("Gsie,Gsic->Gsec", expert_Gsie, position_Gsic)
        x_GecD = einsum("Gsec,GsD->GecD", sent_Gsec, x_GsD)
    id_Gec = choice_ids(experts, routing, capacity)[2] if experts.has_dropout else None
    y_GecD = exchange_with_experts(experts, x_GecD, id_Gec)
    with jax.named_scope("combine"):
        weights_Gsie = expert_Gsie * routing.gate_Gsi[..., None].astype(x_GsD.dtype)
        combine_Gsec = einsum("Gsie,Gsic->Gsec", weights_Gsie, position_Gsic)
        return einsum("Gsec,GecD->GsD", combine_Gsec, y_GecD)


def by_gather(experts: Experts, x_GsD: Array, routing: Routing, capacity: int) -> Array:
    """Dispatches by index: each slot reads its token, and each token its slots."""
    layout, d_model = experts.layout, x_GsD.shape[-1]
    with jax.named_scope("dispatch"):
        slot_Gsi, here_Gc, id_Gec = choice_ids(experts, routing, capacity)
        x_GcD = to_slots(x_GsD, slot_Gsi, here_Gc)
        x_GecD = layout.reshape(x_GcD, (*id_Gec.shape, d_model), "GecD")
    y_GecD = exchange_with_experts(experts, x_GecD, id_Gec if experts.has_dropout else None)
    with jax.named_scope("combine"):
        y_GcD = layout.reshape(y_GecD, x_GcD.shape, "GcD")
        return combine(y_GcD, slot_Gsi, here_Gc, routing.gate_Gsi)


Send = Callable[[Experts, Array, Routing, int], Array]
WITH_CAPACITY: Mapping[str, Send] = {"einsum": by_einsum, "gather": by_gather}


def choice_ids(experts: Experts, routing: Routing, capacity: int) -> tuple[Array, Array, Array]:
    """Returns the slot of each choice, the choice at each slot, and the ids of choices by expert.

    Slots are numbered through all experts.
    """
    layout, (groups, *choices) = experts.layout, routing.expert_Gsi.shape
    slots = experts.num_experts * capacity
    slot_Gsi = routing.expert_Gsi * capacity + routing.position_Gsi
    slot_Gsi = jnp.where(routing.kept_Gsi, slot_Gsi, slots)
    find_choices = functools.partial(choice_at_slot, slots=slots)
    here_Gc = layout.shard_map(find_choices, "Gsi->Gc")(slot_Gsi)
    id_Gc = layout.iota("Gc", here_Gc.shape, "G") * math.prod(choices) + here_Gc
    return slot_Gsi, here_Gc, layout.reshape(id_Gc, (groups, experts.num_experts, capacity), "Gec")


def exchange_with_experts(experts: Experts, x_GecD: Array, id_Gec: Array | None) -> Array:
    """Runs the experts on the tokens, which an all-to-all moves to their devices and back."""
    layout, id_EGc = experts.layout, None
    x_EGcD = layout.einsum("GEcD->EGcD", layout.reshard(x_GecD, "GEcD"))
    if id_Gec is not None:
        id_EGc = layout.einsum("GEc->EGc", layout.reshard(id_Gec, "GEc"))
    return layout.reshard(layout.einsum("EGcD->GEcD", experts.run(x_EGcD, id_EGc)), "GecD")


def in_blocks(
    experts: Experts, x_GsD: Array, routing: Routing, decoding_router: Router | None
) -> Array:
    """Gives each expert enough blocks of slots for all its tokens, so that nothing is dropped.

    Each device sends its tokens to the devices of their experts, if that takes less memory than to
    keep the tokens and gather the experts' weights.  Gale et al. 2022 (MegaBlocks).  In decoding,
    weights stay where they are.  There, a router bounds the buffer of each device, and tokens that
    overflow it are sent in further rounds.
    """
    layout, weights = experts.layout, experts.weights
    shape = routing.expert_Gsi.shape
    group_axes = mesh_axes(layout.place("GF")[0])
    if decoding_router is None:
        e, split_axes = "e", exchange_axes(layout, math.prod(shape), weights)
        exchanged, stored_e = split_axes, "E" if split_axes else "e(G)"
    else:
        split_axes = mesh_axes(layout.place("EGF")[0])
        # Stored weights may be split along another axis, and their number may not divide.
        if weights["wi_EDF"].shape[0] % num_shards(split_axes):
            split_axes = ()
        e = "E" if split_axes else "e"
        exchanged, stored_e = tuple(axis for axis in split_axes if axis in group_axes), f"{e}(G)"
    hidden_axes = mesh_axes(layout.place(f"{e}GF")[2])
    # Along these axes, each device computes a partial sum of its tokens' results.
    weight_axes = (*(axis for axis in split_axes if axis not in exchanged), *hidden_axes)
    senders = num_shards(exchanged)
    sent_tokens = math.prod(shape[:2]) // num_shards(group_axes) * senders
    places = most_places = sent_tokens * shape[2]
    if decoding_router is not None:
        slots = decoding_router.slots(sent_tokens, num_shards(split_axes), training=False)
        places = min(most_places, slots)
    expert_Gsi = jnp.where(routing.kept_Gsi, routing.expert_Gsi, -1)
    id_Gs1 = layout.iota("Gs1", (*shape[:2], 1), "G") * shape[1]
    id_Gs1 = (id_Gs1 + layout.iota("Gs1", id_Gs1.shape, "s")) * shape[2]
    id_Gsi = id_Gs1 + layout.iota("Gsi", expert_Gsi.shape, "i")
    names = [name for name in sorted(weights) for _ in jax.tree.leaves(weights[name])]
    arrays, structure = jax.tree.flatten(dict(weights))
    arrays = [reduced_over(array, [group_axes]) for array in arrays]
    stored = [spec_of(array) for array in arrays]
    named = zip(names, arrays, strict=True)
    gathered = [layout.place(stored_e + axes_of_shard(name, x.shape)) for name, x in named]
    pairs = zip(stored, gathered, strict=True)
    stored = [old if is_gatherable(old, new, group_axes) else new for old, new in pairs]

    def run(seed: Array, *operands: Array) -> Array:
        # Varying, for the custom gradients; JAX then adds up gradients of what devices share.
        routed = RoutedTokens(*(jax.lax.pcast(x, weight_axes, to="varying") for x in operands[:4]))
        parts = zip(operands[4:], stored, gathered, strict=True)
        shards = tuple(gather_shard(*part, group_axes) for part in parts)
        of_device = jax.tree.unflatten(structure, shards)
        count, here = len(shards[0]), experts._replace(weights=of_device, hidden_axes=hidden_axes)
        draw = functools.partial(random_bytes_of_shard, seed, over=hidden_axes)
        expert_Gsi = routed.expert_Gsi
        if places == most_places and not exchanged:
            expert_Gsi -= shard_index(split_axes) * count
            y_Gsd = run_shard(here, routed._replace(expert_Gsi=expert_Gsi), draw)
        else:
            to_c = destinations(expert_Gsi.ravel() // count, split_axes, exchanged)
            routed = routed._replace(expert_Gsi=expert_Gsi % count)
            exchange = Exchange.of(exchanged, senders, to_c, places)
            axes = (*group_axes, *weight_axes)
            rows = exchange.most_rows(axes) if places < most_places else None
            y_Gsd = run_exchanged(here, routed, draw, exchange, rows)
        return jax.lax.psum(y_Gsd, weight_axes)

    tokens = [f"G(F){axes}" for axes in ("sd", "si", "si", "si")]
    mapped = layout.shard_map(run, f"{','.join(['s', *tokens, *'*' * len(stored)])}->{tokens[0]}")
    placed = map(jax.sharding.reshard, arrays, stored)
    y_GsD = mapped(experts.seed, x_GsD, expert_Gsi, routing.gate_Gsi, id_Gsi, *placed)
    return layout.reshard(y_GsD, "GsD")


def axes_of_shard(name: str, shape: tuple[int, ...]) -> str:
    """Returns the axes of a weight, or of its scale, except E; D is unsplit, for products."""
    letters = name.rpartition("_")[2][1:]
    sizes = zip(letters.replace("D", "d"), shape[1:], strict=True)
    return "".join("1" if size == 1 else axis for axis, size in sizes)


def exchange_axes(layout: Layout, choices: int, weights: Mapping[str, Weight]) -> tuple[str, ...]:
    """Returns the mesh axes along which tokens move to their experts; none if weights are smaller.

    They split both groups and experts, evenly, and do not change how the hidden layer is split.  A
    device holds the tokens of all senders, in and out of both products, or all weights.
    """
    count, d_model, d_ff = weights["wi_EDF"].shape
    group_axes, hidden_axes = map(mesh_axes, layout.place("GF"))
    expert_axes, hidden_of_experts = map(mesh_axes, layout.place("EF"))
    # Stored weights may be split along another axis, and the number of experts may not divide.
    if not set(expert_axes) <= set(group_axes) or count % num_shards(expert_axes):
        return ()
    if hidden_axes != hidden_of_experts:
        return ()
    received = choices * num_shards(expert_axes) // num_shards(group_axes)
    is_less = received * 2 * (d_model + d_ff) < sum(math.prod(w.shape) for w in weights.values())
    return expert_axes if is_less else ()


class RoutedTokens(NamedTuple):
    """Holds the tokens of a device, and their choices."""

    x_Gsd: Array
    expert_Gsi: Array
    """Indices into the experts that the device has."""
    gate_Gsi: Array
    id_Gsi: Array


def run_shard(experts: Experts, routed: RoutedTokens, draw: Draw) -> Array:
    """Runs a device's tokens through its experts."""
    x_Gsd, expert_Gsi, gate_Gsi, id_Gsi = routed
    count, choices = len(jax.tree.leaves(experts.weights)[0]), expert_Gsi.size
    x_1sd = x_Gsd.reshape(1, -1, x_Gsd.shape[-1])
    gate_1si = gate_Gsi.reshape(1, -1, gate_Gsi.shape[-1])
    size = block_tokens(choices, count)
    # In kernels, blocks without an expert write the zeros of experts without a block.
    spare = -(-count // size) if grouped_matmul.has_kernels() else 0
    slot_i, expert_l = block_slots(expert_Gsi.ravel(), count, size, spare)
    slot_1si, shape = slot_i.reshape(gate_1si.shape), (len(expert_l), size)
    here_1c = choice_at_slot(slot_1si, math.prod(shape))
    id_lc = id_Gsi.ravel().at[here_1c[0]].get(mode="clip").reshape(shape)
    x_1cd = to_slots(x_1sd, slot_1si, here_1c)
    gate_lc = to_slots(gate_1si.reshape(1, -1, 1), slot_1si.reshape(1, -1, 1), here_1c)
    x_lcd, gate_lc = x_1cd.reshape(*shape, -1), gate_lc.reshape(shape)
    y_lcd = experts.run_blocks(x_lcd, gate_lc, expert_l, functools.partial(draw, id_lc))
    return from_slots(y_lcd.reshape(x_1cd.shape), slot_1si, here_1c).reshape(x_Gsd.shape)


def destinations(shard_c: Array, split_axes: tuple[str, ...], exchanged: tuple[str, ...]) -> Array:
    """Returns which of the devices that exchange tokens each choice goes to, given its shard of E.

    If only other devices reach that shard, this is a number beyond the last device.
    """
    device_c, is_here_c, devices = jnp.zeros_like(shard_c), shard_c >= 0, 1
    for axis in reversed(split_axes):
        size = jax.lax.axis_size(axis)
        shard_c, index_c = shard_c // size, shard_c % size
        if axis in exchanged:
            device_c, devices = device_c + index_c * devices, devices * size
        else:
            is_here_c &= index_c == jax.lax.axis_index(axis)
    return jnp.where(is_here_c, device_c, devices)


def run_exchanged(
    experts: Experts, routed: RoutedTokens, draw: Draw, exchange: Exchange, most_rows: Array | None
) -> Array:
    """Sends a device's tokens to the devices of their experts, and brings the results back.

    If a device may receive more tokens than fit into its buffer, this takes several rounds.
    """
    x_Gsd, expert_Gsi, gate_Gsi, id_Gsi = routed
    here_c = jnp.argsort(exchange.destination_c, stable=True)
    slot_1si = jnp.argsort(here_c).reshape(1, -1, expert_Gsi.shape[-1])
    x_1sd = x_Gsd.reshape(1, -1, x_Gsd.shape[-1])
    x_1cd = to_slots(x_1sd, slot_1si, here_c[None])
    choice_c2 = jnp.stack([expert_Gsi.ravel(), id_Gsi.ravel()], axis=1)[here_c]
    gate_1c1 = to_slots(gate_Gsi.reshape(1, -1, 1), slot_1si.reshape(1, -1, 1), here_c[None])

    def add_part(part: Exchange, y_cd: Array) -> Array:
        x_rd, choice_r2 = part.send(x_1cd[0], 0), part.send(choice_c2, -1)
        expert_1r1, id_1r1 = (choice_r2[None, :, i, None] for i in (0, 1))
        gate_1r1 = part.send(gate_1c1[0], 0)[None]
        received = RoutedTokens(x_rd[None], expert_1r1, gate_1r1, id_1r1)
        return part.send_back(run_shard(experts, received, draw)[0], y_cd)

    def add_round(carry: tuple[Array, Array]) -> tuple[Array, Array]:
        first, y_cd = carry
        return first + exchange.places, add_part(exchange.part(first), y_cd)

    y_cd = jnp.zeros_like(x_1cd[0])
    if most_rows is None:
        y_cd = add_part(exchange, y_cd)
    else:
        start = (jnp.zeros_like(most_rows), y_cd)
        _, y_cd = jax.lax.while_loop(lambda carry: carry[0] < most_rows, add_round, start)
    return from_slots(y_cd[None], slot_1si, here_c[None]).reshape(x_Gsd.shape)


def block_slots(expert_i: Array, count: int, size: int, spare: int = 0) -> tuple[Array, Array]:
    """Returns the slot of each choice, and the expert of each block of `size` slots.

    Blocks are in the order of their experts; the last ones, at least `spare`, have no expert, but
    `count` in its place.  A choice whose expert is not in [0, count) gets the slot after the last.
    """
    (choices,) = expert_i.shape
    experts = min(count, choices)  # that may have tokens; the last block of each may not be full
    blocks = experts + (choices - experts) // size + spare
    expert_i = jnp.where((expert_i >= 0) & (expert_i < count), expert_i, count)
    choices_e = jnp.bincount(expert_i, length=count).astype(jnp.int32)
    blocks_e = -(-choices_e // size)
    ends_e = jnp.cumsum(blocks_e)
    rank_i = jnp.argsort(jnp.argsort(expert_i, stable=True)).astype(jnp.int32)
    rank_i -= (jnp.cumsum(choices_e) - choices_e).at[expert_i].get(mode="clip")
    first_i = (ends_e - blocks_e).at[expert_i].get(mode="clip")
    slot_i = jnp.where(expert_i < count, first_i * size + rank_i, blocks * size)
    expert_l = jnp.searchsorted(ends_e, jnp.arange(blocks, dtype=jnp.int32), side="right")
    return slot_i, expert_l


def choice_at_slot(slot_Gsi: Array, slots: int) -> Array:
    """Returns the choice at each slot of a group; at empty slots, the number of choices.

    Choices are numbered: choice i of token s is number s * (choices per token) + i.
    """
    groups, *shape = slot_Gsi.shape
    choices = math.prod(shape)
    group_G1 = jnp.arange(groups, dtype=jnp.int32)[:, None]
    none_Gc = jnp.full((groups, slots), choices, jnp.int32)
    choice_i = jnp.arange(choices, dtype=jnp.int32)
    slot_Gs = slot_Gsi.reshape(groups, choices)
    return none_Gc.at[group_G1, slot_Gs].set(choice_i, mode="drop")


def gather_rows_or_zeros(x_GsD: Array, index_Gc: Array) -> Array:
    """Gathers rows of each group by index, and zeros if an index is beyond the last row."""
    return jnp.take_along_axis(x_GsD, index_Gc[:, :, None], axis=1, mode="fill", fill_value=0)


@jax.custom_vjp
def to_slots(x_GsD: Array, slot_Gsi: Array, here_Gc: Array) -> Array:
    """Copies tokens to their slots, given the choice at each slot; empty slots get zeros."""
    return gather_rows_or_zeros(x_GsD, here_Gc // slot_Gsi.shape[-1])


@jax.custom_vjp
def from_slots(y_GcD: Array, slot_Gsi: Array, here_Gc: Array) -> Array:
    """Sums the rows in each token's slots."""
    parts = [gather_rows_or_zeros(y_GcD, slot_Gsi[:, :, i]) for i in range(slot_Gsi.shape[-1])]
    return sum(parts[1:], parts[0])


# Each is the gradient of the other, without a scatter: each token knows its slots.
to_slots.defvjp(
    lambda x_GsD, *places: (to_slots(x_GsD, *places), places),
    lambda places, dx_GcD: (from_slots(dx_GcD, *places), None, None),
)
from_slots.defvjp(
    lambda y_GcD, *places: (from_slots(y_GcD, *places), places),
    lambda places, dy_GsD: (to_slots(dy_GsD, *places), None, None),
)


@jax.custom_vjp
def combine(y_GcD: Array, slot_Gsi: Array, here_Gc: Array, gate_Gsi: Array) -> Array:
    """Sums the rows in each token's slots, times its gates."""
    parts = [
        gate_Gsi[:, :, i, None].astype(y_GcD.dtype) * gather_rows_or_zeros(y_GcD, slot_Gsi[:, :, i])
        for i in range(slot_Gsi.shape[-1])
    ]
    return sum(parts[1:], parts[0])


def _combine_backward(saved: tuple[Array, ...], dy_GsD: Array) -> tuple[Array, None, None, Array]:
    y_GcD, slot_Gsi, here_Gc, gate_Gsi = saved
    choices = gate_Gsi.shape[-1]
    token_Gc = here_Gc // choices
    choice_11i = jnp.arange(choices, dtype=jnp.int32)[None, None]
    is_here_Gci = (here_Gc % choices)[:, :, None] == choice_11i
    gate_Gc = jnp.sum(jnp.where(is_here_Gci, gather_rows_or_zeros(gate_Gsi, token_Gc), 0), axis=-1)
    dy_GcD = gate_Gc[:, :, None].astype(dy_GsD.dtype) * gather_rows_or_zeros(dy_GsD, token_Gc)
    wide_GsD = dy_GsD.astype(float)
    parts = [gather_rows_or_zeros(y_GcD, slot_Gsi[:, :, i]) for i in range(choices)]
    dgates = [jnp.sum(wide_GsD * y_GsD.astype(float), axis=-1) for y_GsD in parts]
    return dy_GcD, None, None, jnp.stack(dgates, axis=-1)


combine.defvjp(lambda *operands: (combine(*operands), operands), _combine_backward)
