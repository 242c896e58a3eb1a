"""What is read off the text of programs that were really compiled, for eight virtual devices."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding

from layouts.cost.collectives import Collective
from layouts.cost.jaxpr_cost import OpCost
from layouts.hlo.program import CompiledText, equation
from tests.layouts.hlo.programs import sizes as programs

SIZES = {"x": 4, "y": 2}
ITERATIONS, ROWS, INNER, OUTER = 5, 8, 12, 20


def mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)


def compiled(function, *places: tuple[tuple[int, ...], jax.P]) -> CompiledText:
    """A function of float32 arrays of these shapes and placements, compiled and read."""
    with jax.set_mesh(mesh()) as _:
        arguments = [
            jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh(), place))
            for shape, place in places
        ]
        return CompiledText.read(jax.jit(function).lower(*arguments).compile().as_text())


def loop(x, w):
    """Products in a scan, each of which sums over a split axis."""

    def body(x, _):
        h = jnp.einsum("bd,df->bf", x, w, out_sharding=jax.P("x", None))
        return jnp.einsum("bf,df->bd", jnp.tanh(h), w, out_sharding=jax.P("x", "y")), None

    return jax.lax.scan(body, x, None, length=ITERATIONS)[0]


def test_trip_counts_of_loops_are_multiplied() -> None:
    program = compiled(loop, ((ROWS, INNER), jax.P("x", "y")), ((INNER, OUTER), jax.P("y", None)))
    one = 2 * ROWS * INNER * OUTER // 8  # of a product that all devices share
    assert program.flops == ITERATIONS * 2 * one
    exchanged = [
        collective for collective in program.collectives(SIZES) if collective.mesh_axes == ("y",)
    ]
    reduced = [
        collective
        for collective in exchanged
        if collective.kind in ("all-reduce", "reduce-scatter")
    ]
    assert sum(collective.times for collective in reduced) == ITERATIONS
    assert {collective.bytes for collective in reduced} == {ROWS // 4 * OUTER * 4}
    assert {collective.group for collective in reduced} == {2}


@pytest.mark.parametrize("flip", [False, True])
def test_of_a_conditional_the_larger_branch_counts(flip: bool) -> None:
    def choose(x: jax.Array, w: jax.Array) -> jax.Array:
        small, large = (lambda: x @ w[:, :4] @ w[:, :4].T), (lambda: x @ w @ w.T)
        return jax.lax.cond(x[0, 0] > 0, *((small, large) if flip else (large, small)))

    whole = jax.P(None, None)
    program = compiled(choose, ((ROWS, INNER), whole), ((INNER, OUTER), whole))
    assert program.flops == 2 * 2 * ROWS * INNER * OUTER


@pytest.mark.parametrize("axes", [("x",), ("x", "y")])
def test_a_gather_is_found_along_its_mesh_axes(axes: tuple[str, ...]) -> None:
    program = compiled(
        lambda x: jax.sharding.reshard(x, jax.P(None, None)), ((16, 3), jax.P(axes, None))
    )
    (collective,) = program.collectives(SIZES)
    group = int(np.prod([SIZES[axis] for axis in axes]))
    assert collective._replace(source="", scopes="") == Collective(
        "all-gather", axes, group, 16 * 3 * 4, 1, ""
    )
    assert collective.received_bytes == 16 * 3 * 4 * (group - 1) / group


def test_an_exchange_of_all_with_all_is_one() -> None:
    program = compiled(
        lambda x: jax.sharding.reshard(x, jax.P(None, "x")), ((8, 12), jax.P("x", None))
    )
    assert {collective.kind for collective in program.collectives(SIZES)} == {"all-to-all"}
    assert sum(collective.bytes for collective in program.collectives(SIZES)) == 8 * 12 * 4 // 4


@pytest.mark.parametrize(
    ("stride", "padding", "dilation", "holes"),
    [(1, (0, 0), 1, 1), (2, (1, 2), 1, 1), (1, (3, 3), 2, 1), (1, (2, 2), 1, 3)],
)
def test_multiplications_with_padding_and_holes_are_not_counted(
    stride: int, padding: tuple[int, int], dilation: int, holes: int
) -> None:
    """TPUs write products as such convolutions."""
    size, kernel, features, outputs, batch = 9, 4, 3, 5, 2

    def convolve(x, w):
        return jax.lax.conv_general_dilated(
            x, w, (stride,), [padding], (holes,), (dilation,), ("NCH", "OIH", "NCH")
        )

    text = jax.jit(convolve).lower(
        jnp.ones((batch, features, size)), jnp.ones((outputs, features, kernel))
    ).compile().as_text()  # fmt: skip
    program = CompiledText.read(text)
    # By hand: an input of ones, in which only real numbers count.
    wide = np.zeros((size - 1) * holes + 1)
    wide[::holes] = 1
    wide = np.pad(wide, padding)
    reach = (kernel - 1) * dilation
    met = sum(wide[i : i + reach + 1 : dilation].sum() for i in range(0, len(wide) - reach, stride))
    assert program.flops == 2 * batch * outputs * features * met


def test_a_loop_without_a_known_end_is_counted_by_the_iteration() -> None:
    def search(x, w):
        def body(x):
            return jnp.tanh(x @ w)

        with jax.named_scope("search"):
            return jax.lax.while_loop(lambda x: jnp.sum(x) > 3, body, x @ w @ w)

    shapes = (ROWS, INNER), (INNER, INNER)
    text = jax.jit(search).lower(*map(jnp.ones, shapes)).compile().as_text()
    program, one = CompiledText.read(text, "search"), 2 * ROWS * INNER * INNER
    assert (program.flops, program.iteration.flops) == (3 * one, one)


def text_of_program(name: str) -> str:
    """The text of a program for TPUs or GPUs, kept in `programs/`."""
    return (Path(__file__).parent / "programs" / f"{name}.txt").read_text()


def program(name: str) -> CompiledText:
    return CompiledText.read(text_of_program(name))


def test_a_counter_that_goes_up_by_two_halves_the_trip_count() -> None:
    """The compiler makes loops of a product and the exchange of its operand or result."""
    windowed, devices = program("windowed_product"), 8
    assert windowed.flops == 2 * (2 * programs.B * programs.D * programs.F) // devices
    permutes = windowed.collectives({"y": devices})
    whole = 2 * programs.B * programs.D  # bytes of what is gathered, and of what is scattered
    received_bytes = sum(permute.received_bytes for permute in permutes)
    # Round the ring both ways; the last step of each way sends what is there already.
    assert received_bytes == 2 * whole * (devices + 1) / devices
    # Nothing runs between the start and the end of the last one, after both loops.
    *in_loops, last = (permute.overlaps for permute in permutes)
    assert all(in_loops) and not last


def test_a_gather_that_several_fusions_share_counts_once_and_overlaps() -> None:
    gathers = program("gathered_weights").collectives({"y": 16})
    whole = 2 * programs.D * programs.F
    assert [(gather.bytes, gather.times) for gather in gathers] == [(whole, programs.N)] * 2
    assert [gather.overlaps for gather in gathers] == [False, True]


def test_a_program_goes_on_behind_the_metadata_of_a_kernel() -> None:
    read = program("gathered_weights")
    assert read.flops == programs.N * 2 * (2 * programs.B * programs.D * programs.F)
    array = 2 * programs.B * programs.D
    [(name, kernel)] = read.kernels
    assert name == "double"
    assert kernel._replace(source="", scopes="") == OpCost(0, 2 * array, 0, programs.N)
    assert kernel.source.startswith("tests/layouts/hlo/programs/compile.py:")


def test_a_program_for_gpus_lists_products_and_what_moves() -> None:
    layers, devices = program("layers_on_gpus"), 8
    rows, item_bytes = 16 * programs.B // devices, 2
    x, h = rows * programs.D * item_bytes, rows * programs.F * item_bytes
    weight = programs.D * programs.F * item_bytes
    of_a_product = OpCost(2 * rows * programs.D * programs.F, x + weight + h, 0, programs.N)
    products = [op for op in layers.ops if op.flops]
    assert [op._replace(source="", scopes="") for op in products] == [of_a_product] * 2
    assert all("/while/body/" in op.scopes and "->" in op.source for op in products)
    # A layer's shard is read from those of all layers, which are not read with it.  Before the loop
    # one of the weights is transposed and the rows are copied.
    shard = weight // devices
    moved = sorted((op.bytes, op.times) for op in layers.ops if not op.flops and op.bytes > shard)
    before = [(2 * programs.N * shard, 1), (2 * x, 1)]
    index_bytes = 4
    assert moved == [(2 * shard + index_bytes, programs.N)] * 2 + before
    gathers = layers.collectives({"y": devices})
    assert [(g.kind, g.bytes, g.times) for g in gathers] == [("all-gather", weight, programs.N)] * 2
    assert layers.flops == sum(op.times * op.flops for op in layers.ops)


ADDED_IN_PLACE = """HloModule added

%fused (all: f32[8,64], row: f32[1,64], at: s32[]) -> f32[8,64] {
  %all = f32[8,64]{1,0} parameter(0)
  %row = f32[1,64]{1,0} parameter(1)
  %at = s32[] parameter(2)
  %zero = s32[] constant(0)
  %before = f32[1,64]{1,0} dynamic-slice(%all, %at, %zero), dynamic_slice_sizes={1,64}
  %sum = f32[1,64]{1,0} add(%before, %row)
  ROOT %after = f32[8,64]{1,0} dynamic-update-slice(%all, %sum, %at, %zero)
}

ENTRY %main (all: f32[8,64], row: f32[1,64], at: s32[]) -> f32[8,64] {
  %all = f32[8,64]{1,0} parameter(0)
  %row = f32[1,64]{1,0} parameter(1)
  %at = s32[] parameter(2)
  ROOT %fusion = f32[8,64]{1,0} fusion(%all, %row, %at), kind=kLoop, calls=%fused
}
"""


def test_a_fusion_that_adds_to_a_part_in_place_moves_that_part() -> None:
    [op] = CompiledText.read(ADDED_IN_PLACE).ops
    row_bytes, index_bytes = 64 * 4, 4
    assert op.bytes == 3 * row_bytes + index_bytes  # two are read and one is written


@pytest.mark.parametrize(
    "kind, dtype", [("s8", "int8"), ("f8e4m3fn", "float8_e4m3fn"), ("bf16", "")]
)
def test_a_product_in_a_fusion_has_the_type_of_its_operands(kind: str, dtype: str) -> None:
    text = f"""HloModule product

%fused (a: {kind}[4,8], b: {kind}[8,2]) -> f32[4,2] {{
  %a = {kind}[4,8]{{1,0}} parameter(0)
  %b = {kind}[8,2]{{1,0}} parameter(1)
  ROOT %c = f32[4,2]{{1,0}} dot(%a, %b), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
}}

ENTRY %main (a: {kind}[4,8], b: {kind}[8,2]) -> f32[4,2] {{
  %a = {kind}[4,8]{{1,0}} parameter(0)
  %b = {kind}[8,2]{{1,0}} parameter(1)
  ROOT %fusion = f32[4,2]{{1,0}} fusion(%a, %b), kind=kCustom, calls=%fused
}}
"""
    [op] = CompiledText.read(text).ops
    assert (op.flops, op.dtype) == (2 * 4 * 8 * 2, dtype)


def test_a_transfer_overlaps_with_what_runs_before_its_end() -> None:
    text = text_of_program("layers_on_gpus")
    lines = text.splitlines(keepends=True)
    start = next(i for i, line in enumerate(lines) if "%all-gather-start.1 = " in line)
    end = next(i for i, line in enumerate(lines) if "%all-gather-done.1 = " in line)
    lines.insert(start + 1, lines.pop(end))
    blocking = CompiledText.read("".join(lines)).collectives({"y": 8})
    overlapped = CompiledText.read(text).collectives({"y": 8})
    assert [gather.overlaps for gather in overlapped] == [True, True]
    assert [gather.overlaps for gather in blocking] == [True, False]


def test_the_equation_of_an_operation_is_in_its_name() -> None:
    names = (
        "jit(train_step)/transpose(jvp(bd,dj->bj))/dot_general",
        "jit(train_step)/transpose(jvp(embed/scatter-add))",
        r"state[\'params\'][\'norm\'][\'scale_D\']",
    )
    assert [*map(equation, names)] == ["bd,dj->bj", "scatter-add", "state/params/norm/scale_D"]
