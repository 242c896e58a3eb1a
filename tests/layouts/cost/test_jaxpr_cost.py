"""What a trace alone says of FLOPs and traffic."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas
from jax.sharding import NamedSharding

from layouts.cost.dataflow import KernelWork, total_flops, work_by_kernel
from layouts.cost.jaxpr_cost import WorkCounts, cost_of, product_letters
from layouts.cost.peak_memory import peak_bytes
from layouts.mesh import abstract_mesh

SIZES = {"x": 4, "y": 2}
B, D, F = 64, 40, 24
ONE = 2 * B * D * F  # FLOPs of a product of all three


def cost(function, *places: tuple[tuple[int, ...], jax.P], merges: bool = True) -> WorkCounts:
    mesh = abstract_mesh(SIZES)
    with jax.sharding.use_abstract_mesh(mesh):
        arguments = [
            jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, place))
            for shape, place in places
        ]
        return cost_of(jax.jit(function).trace(*arguments).jaxpr.jaxpr, SIZES, merges=merges)


def layer(out: jax.P):
    return lambda x, w: jnp.einsum("bd,df->bf", x, w, out_sharding=out)


def transfers(cost: WorkCounts) -> list[tuple[str, tuple[str, ...], int]]:
    return [
        (collective.kind, collective.mesh_axes, collective.bytes) for collective in cost.collectives
    ]


# The equations of a layer under the layouts of Table 1 (Mesh-TensorFlow), and the guide's figure 4.
@pytest.mark.parametrize(
    ("x", "w", "out", "split", "expected"),
    [
        (("x", None), (None, None), ("x", None), 4, []),
        (("x", None), (None, "y"), ("x", "y"), 8, []),
        (("x", "y"), ("y", None), ("x", None), 8, [("all-reduce", ("y",), B // 4 * F * 4)]),
        (("x", "y"), ("y", None), ("x", "y"), 8, [("reduce-scatter", ("y",), B // 4 * F * 4)]),
        (("x", "y"), (None, "y"), ("x", "y"), 8, [("all-gather", ("y",), B // 4 * D * 4)]),
        (("x", None), ("x", "y"), ("x", "y"), 8, [("all-gather", ("x",), D * F // 2 * 4)]),
        ((None, None), (None, None), (None, None), 1, []),
    ],
)
def test_a_product_sends_what_its_placements_ask_for(x, w, out, split, expected) -> None:
    result = cost(layer(jax.P(*out)), ((B, D), jax.P(*x)), ((D, F), jax.P(*w)))
    assert transfers(result) == expected
    assert result.flops == ONE // split


def test_work_is_what_goes_through_memory_and_what_is_computed_beside() -> None:
    place = jax.P("x", None)

    def step(x, w):
        return jnp.tanh(layer(place)(x, w)) + 1.0

    result = cost(step, ((B, D), place), ((D, F), jax.P(None, None)))
    product, *others, ends = result.ops
    moved_bytes = 4 * (B // 4 * D + D * F + B // 4 * F)
    assert product[:5] == (ONE // 4, moved_bytes, 0, 1, "float32")
    assert ends[:5] == (0, moved_bytes, 0, 1, "")
    assert [other.elements for other in others if other.elements] == [B // 4 * F] * 2
    assert not any(other.bytes for other in others)


def test_a_table_is_read_where_it_is_looked_up() -> None:
    def rows(table, ids):
        return table.at[ids].get(mode="clip", out_sharding=jax.P())

    whole = jax.P(None, None)
    result = cost(lambda table: rows(table, jnp.arange(3)), ((B, D), whole))
    assert max(op.bytes for op in result.ops[:-1]) == 2 * 4 * 3 * D


def test_a_look_up_reads_and_writes_the_rows_of_one_device() -> None:
    """Where JAX replicates them around it, and so does its gradient."""
    place, whole = jax.P(("x", "y"), None), jax.P(None, None)

    def loss(table, ids):
        return (table.at[ids].get(mode="clip", out_sharding=place) ** 2).sum()

    def gradient(table, ids):
        return jax.grad(loss)(table, ids.astype(jnp.int32))

    result = cost(gradient, ((F, D), whole), ((B,), jax.P(("x", "y"))))
    rows, table, ids = 4 * B // 8 * D, 4 * F * D, 4 * B
    sizes = [op.bytes for op in result.ops[:-1]]
    assert 2 * rows in sizes and max(sizes) <= rows + 2 * table + ids


def test_what_is_not_split_is_computed_by_every_device() -> None:
    result = cost(layer(jax.P("x", None)), ((B, D), jax.P("x", None)), ((D, F), jax.P(None, None)))
    assert result.flops == ONE // 4  # the mesh axis y of 2 repeats it


def test_a_tpu_gathers_once_what_two_products_read() -> None:
    places = [((B, D), jax.P("x", "y")), *[((D, F), jax.P(None, "y"))] * 2]

    def both(x, v, w):
        out, views = jax.P("x", "y"), (jnp.reshape(x, (B, 1, D)) for _ in range(2))
        return tuple(
            jnp.einsum("bd,df->bf", view[:, 0], weight, out_sharding=out)
            for view, weight in zip(views, (v, w), strict=True)
        )

    gathered = [("all-gather", ("y",), B // 4 * D * 4)]
    assert transfers(cost(both, *places)) == gathered
    assert transfers(cost(both, *places, merges=False)) == 2 * gathered


def test_a_tpu_adds_gradients_before_it_reduces_them() -> None:
    places = [((B, D), jax.P("x", None)), *[((D, F), jax.P(None, "y"))] * 2]
    reduced = [("all-reduce", ("y",), B // 4 * D * 4)]

    def split(x, v, w):
        out = jax.P("x", "y")
        h = sum(jnp.einsum("bd,df->bf", x, weight, out_sharding=out) for weight in (v, w))
        return jnp.sum(h)

    def of_split(x, v, w):
        return jax.grad(split)(x, v, w)

    def products(cost: WorkCounts) -> list[tuple[str, tuple[str, ...], int]]:
        return [transfer for transfer in transfers(cost) if transfer[2] == reduced[0][2]]

    assert products(cost(of_split, *places)) == reduced
    assert products(cost(of_split, *places, merges=False)) == 2 * reduced


def test_a_loop_counts_its_iterations() -> None:
    def loop(x, w):
        def body(x, _):
            y = jnp.einsum("bd,df->bf", x, w, out_sharding=jax.P("x", "y"))
            return jnp.einsum("bf,df->bd", y, w, out_sharding=jax.P("x", None)), None

        return jax.lax.scan(body, x, None, length=3)[0]

    result = cost(loop, ((B, D), jax.P("x", None)), ((D, F), jax.P(None, "y")))
    assert result.flops == 3 * 2 * ONE // 8
    assert [(collective.kind, collective.times) for collective in result.collectives] == [
        ("all-reduce", 3)
    ]


def test_a_split_table_is_looked_up_in_parts() -> None:
    def look_up(table, ids):
        rows = ids.astype(jnp.int32)
        return table.at[rows].get(mode="clip", out_sharding=jax.P("x", None))

    result = cost(look_up, ((32, D), jax.P("y", None)), ((B,), jax.P("x")))
    assert ("all-reduce", ("y",), B // 4 * D * 4) in transfers(result)
    gathered = [
        collective.bytes for collective in result.collectives if collective.kind == "all-gather"
    ]
    assert max(gathered, default=0) <= B * 4  # at most the ids


def test_a_kernel_counts_each_block_of_its_grid() -> None:
    def double(x_ref, out_ref):
        out_ref[...] = jnp.dot(x_ref[...], 2 * jnp.eye(8))

    block = pallas.BlockSpec((4, 8), lambda i: (i, 0))
    shape = jax.ShapeDtypeStruct((12, 8), jnp.float32)

    def function(x):
        kernel = pallas.pallas_call(
            double, grid=(3,), in_specs=[block], out_specs=block, out_shape=shape, name="double"
        )
        return jax.lax.scan(lambda x, _: (kernel(x), None), x, None, length=5)[0]

    jaxpr = jax.make_jaxpr(function)(shape).jaxpr
    flops, array_bytes = 2 * 12 * 8 * 8, 4 * 12 * 8
    cost = cost_of(jaxpr, {})
    assert cost.flops == total_flops(jaxpr) == 5 * flops
    assert (flops, 2 * array_bytes, 0, 5) in [op[:4] for op in cost.ops]
    assert peak_bytes(jaxpr, {}) == 0  # the loop's result is the caller's
    # Of matrix units with 128 rows and columns, 8 of each are used.
    padded = KernelWork(flops, flops * 16**2, flops * 32**2)
    assert work_by_kernel(jaxpr) == {"double": padded}


def test_letters_of_products() -> None:
    """Of BLD,DF->BLF and of BLK,BKM->BLM."""
    product, in_batches = (((2,), (0,)), ((), ())), (((2,), (1,)), ((0,), (0,)))
    assert product_letters(product, 3, 2) == ((1, 2, 0), (0, 5), (1, 2, 5))
    assert product_letters(in_batches, 3, 3) == ((0, 3, 1), (0, 1, 7), (0, 3, 7))
