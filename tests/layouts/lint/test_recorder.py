"""The record holds what really runs: equal to counts by hand, and the same however layers run."""

import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import pytest

from configs.errors import UserError
from layouts.axes import Axis
from layouts.layout import Layout
from layouts.lint.recorder import record, with_unique_letters
from models.attention.multi_head import MultiHead
from models.feed_forward.mlp import Mlp
from models.positions.relative import Relative
from models.positions.rotary import Rotary
from models.precision import Precision
from models.transformer import TransformerModel
from tests.layouts.lint.recorded import recorded
from tests.toys import SPLITTABLE, WHOLE, toy

KINDS = {
    "plain": toy(),
    "combined, rotary": toy(
        attention=MultiHead(combined_qkv=True), positions=Rotary(), feed_forward=Mlp(gated=True)
    ),
    "relative, chunks": toy(positions=Relative(), loss_chunks=3, tied=False),
}


def test_a_weight_whose_name_has_other_axes_is_refused() -> None:
    def trace(layout: Layout) -> object:
        return {"mlp": {"wi": layout.random(jax.random.normal, jax.random.key(0), "DF", (2, 3))}}

    with pytest.raises(UserError, match=r"weight mlp/wi: found 2 axes, and a name for 0.*as wi_DF"):
        record(trace)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_those_of_init(kind: str) -> None:
    spec = dataclasses.replace(KINDS[kind], precision=Precision(store="bfloat16"))
    with jax.set_mesh(jax.make_mesh((1,), ("data",))):
        params = jax.eval_shape(TransformerModel(spec, WHOLE).init, jax.random.key(0))
    weights = recorded(spec, 4, 8).weights
    assert [weight.shape for weight in weights] == [leaf.shape for leaf in jax.tree.leaves(params)]
    assert all(len(weight.axes) == len(weight.shape) for weight in weights)
    assert sum(weight.bytes for weight in weights) == 2 * sum(
        math.prod(leaf.shape) for leaf in jax.tree.leaves(params)
    )


def test_forward_flops_are_those_of_the_products() -> None:
    """Per token and layer 2 x weights, and 4 x length x head columns for scores and values."""
    D, F, V, heads, kv_heads, K, layers, length = 10, 14, 22, 6, 3, 4, 2, 8
    weights = D * K * (2 * heads + 2 * kv_heads) + 2 * D * F
    per_token = layers * (2 * weights + 4 * length * heads * K) + 2 * D * V
    assert recorded(toy(), 4, length).flops == 4 * length * per_token


@pytest.mark.parametrize("kind", KINDS)
def test_flops_do_not_depend_on_how_layers_run(kind: str) -> None:
    settings = itertools.product([False, True], ["none", "dots", "full"])
    specs = [dataclasses.replace(KINDS[kind], scan=scan, remat=remat) for scan, remat in settings]
    assert len({recorded(spec, 4, 8).flops for spec in specs}) == 1


def test_scans_multiply_and_what_is_traced_and_dropped_counts_nothing() -> None:
    def trace(layout: Layout) -> dict[str, jax.Array]:
        w_NDF = layout.random(jax.random.normal, jax.random.key(0), "NDF", (5, 2, 2), stored=True)

        def twice(x_BD: jax.Array, w_DF: jax.Array) -> tuple[jax.Array, None]:
            again = jnp.zeros((3, 2, 2))
            return jax.lax.scan(
                lambda x_BD, _: (layout.einsum("BD,DF->BF", x_BD, w_DF), None), x_BD, again
            )

        x_BD = layout.iota("BD", (7, 2), "D").astype(jnp.float32)
        jax.eval_shape(twice, x_BD, w_NDF[0])
        jax.lax.scan(twice, x_BD, w_NDF)
        return {"w_NDF": w_NDF}

    result = record(trace)
    assert [product.flops for product in result.products] == [15 * 2 * 7 * 2 * 2]


def test_of_branches_the_one_that_computes_the_most_counts() -> None:
    def trace(layout: Layout) -> dict[str, jax.Array]:
        x_BD = layout.iota("BD", (7, 2), "D").astype(jnp.float32)
        w_DF = layout.iota("DF", (2, 3), "D").astype(jnp.float32)
        product = functools.partial(layout.einsum, "BD,DF->BF", x_BD, w_DF)
        zeros = functools.partial(jnp.zeros_like, jax.eval_shape(product))
        jax.lax.cond(jnp.sum(x_BD) > 0, product, zeros)
        return {}

    assert record(trace).flops == 2 * 7 * 2 * 3


def test_two_axes_of_one_letter_get_different_letters() -> None:
    latent, buckets = Axis("R", "latent"), Axis("R", "buckets")
    assert [axis.letter for axis in with_unique_letters([latent, buckets])] == ["R", "Γ"]


def test_each_tensor_has_its_letters_sizes_and_source_line() -> None:
    result = recorded(SPLITTABLE, 8, 24)
    named = {tensor.name.partition(".py:")[0]: tensor for tensor in result.tensors}
    hidden = named["BLD,DF->BLF at models/feed_forward/mlp"]
    assert (hidden.axes, hidden.shape, hidden.stored) == ("BLF", (8, 24, 40), False)
    weight = named["decoder/layers_N/mlp/wi_DF"]
    assert (weight.axes, weight.shape, weight.stored) == ("NDF", (3, 16, 40), True)
    queries = next(tensor for tensor in result.tensors if tensor.axes == "BL_")
    assert (queries.shape, queries.stored) == ((8, 24, 1), False)
    assert queries.name.startswith("BL_ at models/attention/context.py:")


@functools.partial(jax.jit, static_argnums=0)
def indices(layout: Layout) -> jax.Array:
    """A function whose trace jax keeps for equal layouts."""
    return layout.iota("B", (4,), "B")


def test_a_function_whose_trace_jax_keeps_is_recorded_each_time() -> None:
    first, second = (record(lambda layout: {"ids_B": indices(layout)}) for _ in range(2))
    assert {tensor.name.partition(" at ")[0] for tensor in second.tensors} == {"ids_B", "B"}
    assert first == second


def test_an_axis_that_jax_cannot_split_is_whole() -> None:
    """And if there are two, both are; what fails with all axes whole is a bug."""

    def sums(layout: Layout) -> dict[str, jax.Array]:
        x_BLD = layout.iota("BLD", (4, 6, 10), "L")
        sums_BLD = jnp.cumsum(x_BLD, axis=1)
        return {"sums_BLD": sums_BLD}

    def sums_of_sums(layout: Layout) -> dict[str, jax.Array]:
        return {"both_BLD": jnp.cumsum(sums(layout)["sums_BLD"], axis=2)}

    assert {tensor.axes for tensor in record(sums).tensors if not tensor.stored} == {"B_D"}
    assert {tensor.axes for tensor in record(sums_of_sums).tensors if not tensor.stored} == {"B__"}

    def bug(layout: Layout) -> dict[str, jax.Array]:
        raise KeyError("a bug")

    with pytest.raises(KeyError, match="a bug"):
        record(bug)


def test_axes_that_are_whole_under_every_layout_have_no_letter() -> None:
    def trace(layout: Layout) -> dict[str, jax.Array]:
        x_Bl = layout.iota("Bl", (4, 6), "l")
        layout.reshard(x_Bl, "BL", stored=True)
        return {}

    tensors = record(trace).tensors
    assert ("B_", False) in {(tensor.axes, tensor.stored) for tensor in tensors}
    assert ("BL", True) in {(tensor.axes, tensor.stored) for tensor in tensors}


def test_nothing_is_allocated_and_no_mesh_is_needed() -> None:
    huge = dataclasses.replace(SPLITTABLE, d_model=2**16, d_ff=2**18, layers=1000, scan=True)
    before = len(jax.live_arrays())
    assert sum(weight.bytes for weight in recorded(huge, 2**12, 24).weights) > 1e14
    assert len(jax.live_arrays()) == before


def test_slices_of_queries_are_no_tensors_of_the_layout() -> None:
    """Devices that share the length attend at once: the size of a slice need not divide."""
    sizes = {
        tensor.shape[tensor.axes.index("L")]
        for tensor in recorded(toy(attention=MultiHead(chunks=3)), 4, 8).tensors
        if "L" in tensor.axes and not tensor.stored
    }
    assert sizes == {8}


def test_a_weight_has_the_letters_of_its_path_where_jax_cannot_split_an_axis() -> None:
    def trace(layout: Layout) -> dict[str, jax.Array]:
        w_DF = layout.random(jax.random.normal, jax.random.key(0), "DF", (6, 4), stored=True)
        jnp.cumsum(w_DF, axis=0)
        return {"mlp": {"w_DF": w_DF}}

    [weight] = record(trace).weights
    assert (weight.path, weight.axes) == ("mlp/w_DF", "DF")
