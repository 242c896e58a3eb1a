"""Runs the layers of a stack in stages on different devices, one microbatch after another.

Huang et al. 2019 (GPipe), section 2.3.  At each tick every stage runs layers on one microbatch and
sends the result to the next stage.  A layout enables stages with a rule for layers, "layers:pipe".
Inside the stack, its mesh axes split nothing else.  With `Layout.pipeline_repeats`, microbatches go
around the stages several times, each time through another group of each stage's layers (Narayanan
et al. 2021, section 2.2: the interleaved schedule).
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from layouts.einsum import platform
from layouts.layout import Layout
from layouts.shards import mesh_axes, num_shards, ppermute, spec_of

Tree = Any  # of arrays
# Runs layers, given their weights, the input of a microbatch, its other arrays, and the number of
# the first layer, by default 0; returns the output, and the loads of each layer.
Layers = Callable[..., tuple[Array, Tree]]
Remat = Callable[[Layers], Layers]  # applies the rematerialization of the model's settings
FIRST_GROWTH = 48  # entries of XLA's table of nested maps; see `with_nested_maps`
# At most 10 were seen in one pass through a block; R-drop has two, forward and backward.
MAPS_OF_BLOCK = 64


def stage_axes(layout: Layout) -> tuple[str, ...]:
    """Returns the mesh axes over which a layout runs layers in stages, if any."""
    return layout.stage_axes if num_shards(layout.stage_axes) > 1 else ()


def has_repeats(layout: Layout) -> bool:
    """Returns whether each stage has several groups of layers."""
    return bool(stage_axes(layout)) and layout.pipeline_repeats > 1


class Schedule(NamedTuple):
    """Computes which microbatch each stage runs at each tick.

    Microbatches go in waves with one microbatch per stage: the first of a wave returns from the
    last stage just when the first stage has sent on the others.
    """

    stages: int
    microbatches: int
    repeats: int = 1
    """Times that each microbatch goes around the stages."""

    @property
    def ticks(self) -> int:
        """Returns the number of ticks of the schedule."""
        return self.turn(self.repeats - 1, self.microbatches - 1) + self.stages

    @property
    def bubble(self) -> float:
        """Returns the share of time in which stages idle, before and after microbatches."""
        return (self.ticks - self.repeats * self.microbatches) / self.ticks

    def turn(self, repeat: Any, microbatch: Any) -> Any:
        """Returns when the first stage runs a microbatch; each other stage is a tick later."""
        wave, place = divmod(microbatch, self.stages)
        return (wave * self.repeats + repeat) * self.stages + place

    def work(self, turn: Array) -> tuple[Array, Array]:
        """Returns (repeat, microbatch) of a turn; idle turns are clipped to valid indices."""
        wave, rest = turn // (self.stages * self.repeats), turn % (self.stages * self.repeats)
        microbatch = wave * self.stages + rest % self.stages
        return rest // self.stages, microbatch.clip(0, self.microbatches - 1)


def inside_stages(layout: Layout) -> Layout:
    """Returns the layout inside a stage, where the mesh axes of the stages split nothing else."""
    taken = stage_axes(layout)
    return layout.without(mesh_axes=taken) if taken else layout


def with_nested_maps(layout: Layout, x: Array, blocks: int) -> Array:
    """Returns x unchanged, after enough nested `shard_map`s that those inside stages compile.

    In jax 0.10.2 XLA (`ShardMapExportPass`) keeps the mesh axes around nested maps in a hash table.
    If the table grows when it inserts the first map inside another one, XLA reads freed memory, and
    loses axes ("PartitionId", "IsManualSubgroup") or aborts.  The table grows at 48, 96, 192, ...
    entries.  These maps make it grow here, and not again before the program ends.
    """
    axes, entries = stage_axes(layout), FIRST_GROWTH
    if not axes or jax.__version_info__ >= (0, 12):
        return x
    while entries < blocks * MAPS_OF_BLOCK:
        entries *= 2

    def run(zero: Array) -> Array:
        for _ in range(entries - 1):  # the map around them is an entry, too
            zero = jax.shard_map(
                jax.lax.optimization_barrier, in_specs=jax.P(), out_specs=jax.P(), check_vma=False
            )(zero)
        return zero

    zero = jax.shard_map(
        run, in_specs=jax.P(), out_specs=jax.P(), axis_names=set(axes), check_vma=False
    )(jnp.zeros((), x.dtype))
    return x + zero


def in_stages(layout: Layout, layers: Layers, remat: Remat) -> Layers:
    """Returns the same function, which runs in stages if the layout splits layers.

    Under `jax.vmap` over microbatches, these go through the stages one after another.  If the
    layout has repeats, each group of layers is rematerialised as a unit.
    """
    if not stage_axes(layout):
        return layers

    @jax.custom_batching.custom_vmap
    def staged(weights_N: Tree, x_BLD: Array, other: Tree) -> tuple[Array, Tree]:
        is_mapped = jax.tree.map(lambda x: False, other)
        results = run_stages(layout, layers, remat, weights_N, x_BLD[None], other, is_mapped)
        return jax.tree.map(lambda x: x[0], results)

    @staged.def_vmap
    def run(
        _: int, is_mapped: list[Tree], weights_N: Tree, x_ABLD: Array, others: Tree
    ) -> tuple[tuple[Array, Tree], Tree]:
        assert not any(jax.tree.leaves(is_mapped[0])) and is_mapped[1]
        results = run_stages(layout, layers, remat, weights_N, x_ABLD, others, is_mapped[2])
        return results, jax.tree.map(lambda x: True, results)

    return staged


def before_stages(layout: Layout, layers: Layers) -> Layers:
    """Returns the same function, for layers before the stages: the devices of all stages run them.

    Under `jax.vmap` over microbatches, it runs them one after another.
    """
    if not (axes := stage_axes(layout)):
        return layers

    def unstaged(weights: Tree, x_BLD: Array, other: Tree) -> tuple[Array, Tree]:
        x_BLD, other = jax.tree.map(lambda x: without_axes(x, axes), (x_BLD, other))
        return layers(weights, x_BLD, other)

    in_turn = jax.custom_batching.custom_vmap(unstaged)

    @in_turn.def_vmap
    def run(
        _: int, is_mapped: list[Tree], weights: Tree, x_ABLD: Array, others: Tree
    ) -> tuple[tuple[Array, Tree], Tree]:
        def microbatch(numbered: tuple[Array, Array]) -> tuple[Array, Tree]:
            at, x_BLD = numbered
            other = jax.tree.map(lambda x, each: index(x, at) if each else x, others, is_mapped[2])
            return unstaged(weights, x_BLD, other)

        results = jax.lax.map(microbatch, (jnp.arange(len(x_ABLD), dtype=jnp.int32), x_ABLD))
        return results, jax.tree.map(lambda x: True, results)

    return in_turn


def run_stages(
    layout: Layout,
    layers: Layers,
    remat: Remat,
    weights_N: Tree,
    x_ABLD: Array,
    others: Tree,
    is_mapped: Tree,
) -> tuple[Array, Tree]:
    """Runs all microbatches through all stages; returns their outputs, and the loads of each layer.

    `others` are arrays of all microbatches where `is_mapped`, else the same for each.  A group's
    weights are selected inside `remat`; otherwise each tick would save a copy of them.
    """
    axes, inside = stage_axes(layout), inside_stages(layout)
    schedule = Schedule(num_shards(axes), len(x_ABLD), layout.pipeline_repeats)
    ring = [(stage, (stage + 1) % schedule.stages) for stage in range(schedule.stages)]
    onward = ring if schedule.repeats > 1 else ring[:-1]

    @(remat if has_repeats(layout) else lambda run: run)
    def run_group(groups: Tree, x_BLD: Array, other: Tree, group: Array) -> tuple[Array, Tree]:
        exchange = exchange_of(group, schedule.stages, schedule.repeats)
        in_turn = schedule.repeats > 1
        weights = jax.tree.map(lambda x: index(x, exchange) if in_turn else x[0], groups)
        return layers(weights, x_BLD, other, group * len(jax.tree.leaves(weights)[0]))

    def run_stage(weights_N: Tree, shared: Tree) -> tuple[Array, Tree]:
        stage = jax.lax.axis_index(axes)
        x_ABLD, others = jax.tree.map(lambda x, each: x[0] if each else x, shared, repeated)
        groups = jax.tree.map(lambda x: interleave(x, axes, schedule.repeats), weights_N)

        def tick(x_BLD: Array, number: Array) -> tuple[Array, tuple[Array, Tree]]:
            repeat, microbatch = schedule.work(number - stage)
            group = repeat * schedule.stages + stage
            x_BLD = jnp.where((stage == 0) & (repeat == 0), index(x_ABLD, microbatch), x_BLD)
            other = jax.tree.map(
                lambda x, each: index(x, microbatch) if each else x, others, is_mapped
            )
            y_BLD, loads = run_group(groups, x_BLD, other, group)
            return ppermute(y_BLD, axes, onward), (y_BLD, loads)

        ticks = jnp.arange(schedule.ticks, dtype=jnp.int32)
        _, (outputs, loads) = jax.lax.scan(tick, jnp.zeros_like(x_ABLD[0]), ticks)
        y_ABLD = by_microbatch(outputs, schedule.stages - 1, schedule)[:, -1]  # of the last stage
        loads = jax.tree.map(lambda x: by_microbatch(x, stage, schedule)[:, :, None], loads)
        return y_ABLD[None], loads

    def take_last_stage(y_NABLD: Array) -> Array:
        is_last = jax.lax.axis_index(axes) == schedule.stages - 1
        return jax.lax.psum(jnp.where(is_last, y_NABLD[0], 0), axes)

    weights_N = jax.tree.map(lambda x: without_axes(x, axes, first=axes), weights_N)
    shared = jax.tree.map(lambda x: without_axes(x, axes), (x_ABLD, others))
    repeated = jax.tree.map(is_repeated, shared)
    shared = jax.tree.map(lambda x, each: repeat(x, axes) if each else x, shared, repeated)
    place = jax.tree.map(lambda each: jax.P(axes) if each else jax.P(), repeated)
    y_NABLD, loads = jax.shard_map(
        run_stage,
        in_specs=(jax.P(axes), place),
        out_specs=(jax.P(axes), jax.P(None, None, axes)),
        axis_names=set(axes),
        check_vma=False,  # the types of what layers compute do not show that stages differ
    )(weights_N, shared)
    y_ABLD = jax.shard_map(
        take_last_stage, in_specs=jax.P(axes, *inside.place("aBLD")), out_specs=inside.place("aBLD")
    )(y_NABLD)
    loads = jax.tree.map(lambda x: without_axes(x, axes), loads)
    loads_AN = jax.tree.map(lambda x: reshape_first(x, 4, (schedule.microbatches, -1)), loads)
    return layout.reshard(y_ABLD, "aBLD"), loads_AN


def by_microbatch(x: Array, delay: Array | int, schedule: Schedule) -> Array:
    """Sorts a stage's results of all ticks by microbatch, then by repeat."""
    stages, repeats = schedule.stages, schedule.repeats
    x = jax.lax.dynamic_slice_in_dim(x, delay, schedule.ticks - stages + 1)
    missing = -len(x) % (stages * repeats)
    x = jnp.pad(x, [(0, missing), *[(0, 0)] * (x.ndim - 1)])
    x = reshape_first(x, 1, (-1, repeats, stages))
    return reshape_first(jnp.swapaxes(x, 1, 2), 2, (-1,))[: schedule.microbatches]


def reshape_first(x: Array, count: int, shape: tuple[int, ...]) -> Array:
    """Reshapes the first axes of x, which are not split; one of their new sizes may be -1."""
    place = jax.P(*[None] * len(shape), *spec_of(x)[count:])
    return jnp.reshape(x, (*shape, *x.shape[count:]), out_sharding=place)


def without_axes(x: Array, axes: tuple[str, ...], first: tuple[str, ...] | None = None) -> Array:
    """Gathers x over these mesh axes, but splits its first axis over `first`, if that is given."""
    entries = spec_of(x)
    rest = [tuple(name for name in mesh_axes(entry) if name not in axes) for entry in entries]
    if first is not None:
        rest[0] = first
    return jax.sharding.reshard(x, jax.P(*(entry or None for entry in rest)))


def is_repeated(x: Array) -> bool:
    """Returns whether stages get x repeated along a first axis, instead of sharing it.

    The gradient of a shared array is summed inside the `shard_map`, where XLA's CPU backend aborts
    at 16-bit sums (jax 0.10.2).  That of repeats is summed outside, with more traffic.
    """
    is_float = jnp.issubdtype(x.dtype, jnp.inexact)
    return is_float and x.dtype.itemsize == 2 and platform() == "cpu"


def repeat(x: Array, axes: tuple[str, ...]) -> Array:
    """Repeats x along a new first axis, once for each stage."""
    place = jax.P(axes, *spec_of(x))
    shape = (num_shards(axes), *x.shape)
    return jax.lax.broadcast_in_dim(x, shape, range(1, len(shape)), out_sharding=place)


def interleave(x_N: Array, axes: tuple[str, ...], repeats: int) -> Array:
    """Sends layers to the stages that run them; returns this stage's groups, by their exchange.

    Each stage stores consecutive groups of layers, one for each repeat.  In each exchange every
    stage sends one group and receives one.
    """
    x_N = reshape_first(x_N, 1, (repeats, -1))
    if repeats == 1:
        return x_N
    stages, stage = num_shards(axes), jax.lax.axis_index(axes)
    skipped = stage * repeats // math.lcm(stages, repeats)
    received = []
    for exchange in range(repeats):
        pairs = [
            (group // repeats, group % stages)
            for group in range(stages * repeats)
            if exchange_of(group, stages, repeats) == exchange
        ]
        received.append(ppermute(index(x_N, (exchange - skipped) % repeats), axes, pairs))
    return jnp.stack(received)


def exchange_of(group: Any, stages: int, repeats: int) -> Any:
    """Returns in which exchange a group of layers moves to the stage that runs it.

    Stage group // repeats stores it, and stage group % stages runs it; no two groups of an exchange
    share either.
    """
    return (group + group // math.lcm(stages, repeats)) % repeats


def index(x: Array, position: Array) -> Array:
    """Returns the part of x at a position of its first axis."""
    return jax.lax.dynamic_index_in_dim(x, position, keepdims=False)
