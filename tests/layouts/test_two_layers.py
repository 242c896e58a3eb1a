"""Mesh-TensorFlow's two-layer example costs what its Table 1 says, under its five layouts.

Shazeer et al. 2018, algorithm 1 and section 8: y = relu(x w + bias) v, with all gradients.  Each
layout is compiled for eight virtual devices; what the compiled program sums up over the network,
multiplies and holds equals the paper's formulas.  The last layout is the illegal one of section
8.5.  The axes io and hidden are called d_model and d_ff here.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest

from configs.errors import UserError
from layouts.hlo.program import CompiledText
from layouts.layout import Layout
from layouts.lint.recorder import record
from layouts.lint.report import check, lint
from layouts.mesh import make_mesh, mesh_sizes

DEVICES = 8
BATCH, IO, HIDDEN = 64, 96, 160
LAYOUTS = {
    "empty": Layout(mesh="all:8", rules=""),
    "batch": Layout(mesh="all:8", rules="batch:all"),
    "hidden": Layout(mesh="all:8", rules="d_ff:all"),
    "batch, hidden": Layout(mesh="rows:2,cols:4", rules="batch:rows;d_ff:cols"),
    "batch, hidden, io": Layout(
        mesh="rows:2,cols:2,planes:2", rules="batch:rows;d_ff:cols;d_model:planes"
    ),
}
ILLEGAL = Layout(mesh="all:8", rules="batch:all;d_ff:all")
SHAPES = {"x_BD": (BATCH, IO), "w_DF": (IO, HIDDEN), "bias_F": (HIDDEN,), "v_FD": (HIDDEN, IO)}
ITEM_BYTES = 4


class Costs(NamedTuple):
    """Counts bytes that one device sums with others, its FLOPs, and bytes of its arguments."""

    summed_bytes: int
    flops: int
    argument_bytes: int


def formulas(layout: Layout) -> Costs:
    """Computes Table 1 with its constant factors and lower-order terms.

    Where a product sums over a split axis, its result is summed over the devices: y and the
    gradient of x over hidden, hidden and its gradient over io, the weights' gradients over the
    batch.
    """
    r, c, p = (shard_count(layout, axis) for axis in ("batch", "d_ff", "d_model"))
    b, d_io, d_h = BATCH // r, IO // p, HIDDEN // c
    weights = 2 * d_io * d_h + d_h
    summed = (c > 1) * 2 * b * d_io + (p > 1) * 2 * b * d_h + (r > 1) * weights
    argument_bytes = ITEM_BYTES * (2 * b * d_io + weights)  # x and the gradient of y, as large
    return Costs(ITEM_BYTES * summed, 6 * 2 * b * d_io * d_h, argument_bytes)


def shard_count(layout: Layout, axis: str) -> int:
    """Counts the shards into which a layout splits an axis."""
    rules = dict(pair.split(":") for pair in layout.rules.split(";") if pair)
    return mesh_sizes(layout.mesh, DEVICES)[rules[axis]] if axis in rules else 1


def two_layers(
    layout: Layout, x_BD: jax.Array, w_DF: jax.Array, bias_F: jax.Array, v_FD: jax.Array
) -> jax.Array:
    sum_BF = layout.einsum("BD,DF->BF", x_BD, w_DF)
    h_BF = jax.nn.relu(sum_BF + layout.broadcast_like(bias_F, "F", "BF"))
    return layout.einsum("BF,FD->BD", h_BF, v_FD)


def measure(layout: Layout) -> Costs:
    """Counts what the compiled program does on one device."""
    mesh = make_mesh(layout)

    def argument(name: str) -> jax.ShapeDtypeStruct:
        sharding = jax.NamedSharding(mesh, layout.place(name.rpartition("_")[2]))
        return jax.ShapeDtypeStruct(SHAPES[name], jnp.float32, sharding=sharding)

    @jax.jit
    def step(arguments: tuple[jax.Array, ...], dy_BD: jax.Array) -> Any:
        y_BD, backward = jax.vjp(lambda *arrays: two_layers(layout, *arrays), *arguments)
        return y_BD, backward(dy_BD)

    with jax.set_mesh(mesh):
        executable = step.lower(tuple(map(argument, SHAPES)), argument("x_BD")).compile()
    read = CompiledText.read(executable.as_text() or "")
    sums = read.collectives(mesh_sizes(layout.mesh, DEVICES))
    assert all(collective.kind == "all-reduce" for collective in sums), sums
    memory = executable.memory_analysis()
    assert memory is not None
    summed = sum(collective.times * collective.bytes for collective in sums)
    return Costs(summed, read.flops, memory.argument_size_in_bytes)


def illegal() -> str:
    """Returns the lint's error for the layout of section 8.5."""

    def trace(layout: Layout) -> dict[str, jax.Array]:
        made = {
            name: layout.random(
                jax.random.normal, jax.random.key(0), name.rpartition("_")[2], shape
            )
            for name, shape in SHAPES.items()
        }
        two_layers(layout, *made.values())
        del made["x_BD"]  # no weight
        return made

    try:
        problems = lint(ILLEGAL, mesh_sizes(ILLEGAL.mesh, DEVICES), record(trace), {})
        check("of section 8.5", problems)
    except UserError as error:
        return str(error)
    raise AssertionError("a layout that splits two axes of one tensor over one mesh axis passed")


@pytest.mark.parametrize(
    ("name", "costs"),
    [
        ("empty", Costs(0, 11_796_480, 172_672)),
        ("batch", Costs(123_520, 1_474_560, 129_664)),
        ("hidden", Costs(49_152, 1_474_560, 64_592)),
        ("batch, hidden", Costs(55_456, 1_474_560, 55_456)),
        ("batch, hidden, io", Costs(63_808, 1_474_560, 43_328)),
    ],
)
def test_compiled_programs_cost_what_table_1_says(name: str, costs: Costs) -> None:
    """The figures are those of docs/planning.md."""
    assert measure(LAYOUTS[name]) == formulas(LAYOUTS[name]) == costs


def test_the_formulas_are_those_of_the_paper() -> None:
    """By hand, from sections 8.1 to 8.3: values that a device sums, times four bytes."""
    b, d_io, d_h = 64, 96, 160
    assert formulas(LAYOUTS["batch"]).summed_bytes == 4 * (2 * d_io * d_h + d_h)
    assert formulas(LAYOUTS["hidden"]).summed_bytes == 4 * 2 * b * d_io
    both = 2 * b * d_io // 2 + (2 * d_io * d_h + d_h) // 4
    assert formulas(LAYOUTS["batch, hidden"]).summed_bytes == 4 * both


def test_the_illegal_layout_is_refused_with_its_reason() -> None:
    assert "batch and d_ff both want the mesh axis all" in illegal()
