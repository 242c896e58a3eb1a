"""Runs the layers of a stack in stages on different devices, one microbatch after another.

Huang et al. 2019 (GPipe), section 2.3.  At each tick every stage runs its layers on one microbatch
and sends the result to the next stage.  A layout asks for it by a rule for layers, "layers:pipe",
which then has its mesh axes to itself inside the stack.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from layouts.layout import Layout, mesh_axes, num_shards, parse_rules

Array = jax.Array
Tree = Any  # of arrays
# Runs layers: their weights, the input of a microbatch, what else comes with it, and the number of
# the first layer, 0 where it is left out; returns the output, and the loads of each layer.
Layers = Callable[..., tuple[Array, Tree]]


def stage_axes(layout: Layout) -> tuple[str, ...]:
    """Returns the mesh axes of a layout over which layers are run in stages; none without any."""
    axes = mesh_axes(layout.place("NBLD")[0])
    return axes if num_shards(axes) > 1 else ()


def bubble(stages: int, microbatches: int) -> float:
    """Returns the share of their time that stages idle, before and after microbatches reach them.

    >>> bubble(4, 12), bubble(1, 12)
    (0.2, 0.0)
    """
    return (stages - 1) / (microbatches + stages - 1)


def inside_stages(layout: Layout) -> Layout:
    """Returns the layout inside a stage, where the mesh axes of the stages split nothing else."""
    taken = stage_axes(layout)
    if not taken:
        return layout

    def kept(text: str) -> str:
        return ";".join(str(rule) for rule in parse_rules(text) if rule.mesh_axis not in taken)

    return dataclasses.replace(
        layout, rules=kept(layout.rules), param_rules=kept(layout.param_rules)
    )


def in_stages(layout: Layout, layers: Layers) -> Layers:
    """Returns the same function, which runs in stages where the layout splits layers.

    Mapped by `jax.vmap` over microbatches, these go through the stages one after another.
    """
    if not stage_axes(layout):
        return layers

    @jax.custom_batching.custom_vmap
    def staged(weights_N: Tree, x_BLD: Array, other: Tree) -> tuple[Array, Tree]:
        is_mapped = jax.tree.map(lambda x: False, other)
        results = run_stages(layout, layers, weights_N, x_BLD[None], other, is_mapped)
        return jax.tree.map(lambda x: x[0], results)

    @staged.def_vmap
    def run(
        _: int, is_mapped: list[Tree], weights_N: Tree, x_ABLD: Array, others: Tree
    ) -> tuple[tuple[Array, Tree], Tree]:
        assert not any(jax.tree.leaves(is_mapped[0])) and is_mapped[1]
        results = run_stages(layout, layers, weights_N, x_ABLD, others, is_mapped[2])
        return results, jax.tree.map(lambda x: True, results)

    return staged


def run_stages(
    layout: Layout, layers: Layers, weights_N: Tree, x_ABLD: Array, others: Tree, is_mapped: Tree
) -> tuple[Array, Tree]:
    """Runs all microbatches through all stages; returns their outputs, and the loads of each layer.

    What else comes with them is an array of all microbatches where `is_mapped`, or the same for
    each.
    """
    axes, inside = stage_axes(layout), inside_stages(layout)
    stages, microbatches = num_shards(axes), len(x_ABLD)
    onward = [(stage, stage + 1) for stage in range(stages - 1)]

    def run_stage(weights_N: Tree, x_ABLD: Array, others: Tree) -> tuple[Array, Tree]:
        stage = jax.lax.axis_index(axes)
        first_layer = stage * len(jax.tree.leaves(weights_N)[0])
        mapped = jax.tree.map(lambda x, mapped: x if mapped else None, others, is_mapped)

        def tick(x_BLD: Array, turn: tuple[Array, Tree]) -> tuple[Array, tuple[Array, Tree]]:
            new_BLD, mapped = turn
            x_BLD = jnp.where(stage == 0, new_BLD, x_BLD)
            other = jax.tree.map(
                lambda x, same: same if x is None else x, mapped, others, is_leaf=is_none
            )
            y_BLD, loads = layers(weights_N, x_BLD, other, first_layer)
            return jax.lax.ppermute(y_BLD, axes, onward), (y_BLD, loads)

        turns = in_turn(x_ABLD, 0, stages), in_turn(mapped, stage, stages)
        _, results = jax.lax.scan(tick, jnp.zeros_like(x_ABLD[0]), turns)
        y_ABLD, loads_AN = jax.tree.map(
            lambda x: jax.lax.dynamic_slice_in_dim(x, stage, microbatches), results
        )
        return y_ABLD[None], loads_AN

    def take_last_stage(y_NABLD: Array) -> Array:
        is_last = jax.lax.axis_index(axes) == stages - 1
        return jax.lax.psum(jnp.where(is_last, y_NABLD[0], 0), axes)

    weights_N = jax.tree.map(lambda x: without_axes(x, axes, first=axes), weights_N)
    x_ABLD, others = jax.tree.map(lambda x: without_axes(x, axes), (x_ABLD, others))
    y_NABLD, loads_AN = jax.shard_map(
        run_stage,
        in_specs=(jax.P(axes), jax.P(), jax.P()),
        out_specs=(jax.P(axes), jax.P(None, axes)),
        axis_names=set(axes),
        check_vma=False,  # the types of what layers compute do not tell that stages differ
    )(weights_N, x_ABLD, others)
    y_ABLD = jax.shard_map(
        take_last_stage,
        in_specs=jax.P(axes, *inside.place("aBLD")),
        out_specs=inside.place("aBLD"),
    )(y_NABLD)
    loads_AN = jax.tree.map(lambda x: without_axes(x, axes), loads_AN)
    return layout.reshard(y_ABLD, "aBLD"), loads_AN


def without_axes(x: Array, axes: tuple[str, ...], first: tuple[str, ...] | None = None) -> Array:
    """Gathers x over these mesh axes, but splits its first axis over `first`, if that is given."""
    entries = jax.typeof(x).sharding.spec
    rest = [tuple(name for name in mesh_axes(entry) if name not in axes) for entry in entries]
    if first is not None:
        rest[0] = first
    return jax.sharding.reshard(x, jax.P(*(entry or None for entry in rest)))


def in_turn(tree: Tree, delay: Array | int, stages: int) -> Tree:
    """Delays arrays of microbatches by so many ticks, up to stages - 1; other ticks have zeros."""

    def delayed(x: Array) -> Array:
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            bits = delayed(jax.random.key_data(x))
            return jax.random.wrap_key_data(bits, impl=jax.random.key_impl(x))
        ticks = len(x) + stages - 1
        config = [(stages - 1, stages - 1, 0), *[(0, 0, 0)] * (x.ndim - 1)]
        padded = jax.lax.pad(x, jnp.zeros((), x.dtype), config)
        return jax.lax.dynamic_slice_in_dim(padded, stages - 1 - delay, ticks)

    return jax.tree.map(delayed, tree)


def is_none(x: object) -> bool:
    return x is None
