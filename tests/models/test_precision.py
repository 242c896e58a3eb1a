"""Weights of 8 bits: they decode as the numbers that they stand for, under every layout."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding

from configs.load import load
from layouts.axes import leaf_path, letters_of
from layouts.layout import Layout
from layouts.mesh import make_mesh
from models.api import Batch, Params
from models.attention.latent import Latent
from models.decoding.generate import DecodeOutput, Search
from models.feed_forward.mlp import Mlp
from models.feed_forward.moe.layer import Moe
from models.loss import CROSS_ENTROPY
from models.parts import Block
from models.positions.relative import Relative
from models.positions.rotary import Rotary
from models.precision import Precision, is_rounded, quantize_weights
from models.transformer import SOURCE_ARRAYS, Transformer, TransformerModel
from tests.models.decoding.test_generate import (
    APART,
    BEAM,
    DECODER,
    EXPERTS,
    GREEDY,
    LAYOUTS,
    NO_PROMPT,
    PAIR,
    SAMPLED,
    decoded,
    weights,
)
from tests.toys import FLOAT64, ROUND_OFF, WHOLE, packed_rows, pair_rows

GATED = Moe(experts=16, d_ff=24, expert=Mlp(gated=True), shared_d_ff=32)
LATENT = dataclasses.replace(
    DECODER, attention=Latent(latent=12, rotated=4, query_latent=20), positions=Rotary(),
    tied=False, pattern=(Block(), Block(feed_forward=GATED)),
)  # fmt: skip
CASES: dict[str, tuple[Transformer, Search]] = {
    "decoder": (DECODER, SAMPLED), "pair": (PAIR, BEAM), "scan": (NO_PROMPT, APART),
    "experts": (EXPERTS, GREEDY), "latent": (LATENT, GREEDY),
}  # fmt: skip


def whole_numbers(model: TransformerModel, params: Params) -> Params:
    """The ordinary weights that the quantized ones stand for."""
    quantized = quantize_weights(model, params)
    return jax.tree.map(lambda w: w.astype(np.float32), quantized, is_leaf=is_rounded)


@functools.cache
def of_one_device(case: str) -> tuple[DecodeOutput, DecodeOutput]:
    """What the numbers of 8 bits decode as, and the stored ones."""
    return decoded(*CASES[case], change=whole_numbers), decoded(*CASES[case])


def cases() -> list[tuple[str, str]]:
    """Every case on one device, and of the layouts, one that each can split."""
    for_stages = {"pipeline": "decoder"}
    of_layouts = [
        (name, "latent" if name.startswith("expert") else for_stages.get(name, "pair"))
        for name in LAYOUTS
    ]
    return [*(("whole", case) for case in CASES), *of_layouts]


@pytest.mark.few(3)
@pytest.mark.parametrize(("name", "case"), cases())
def test_weights_of_8_bits_decode_as_what_they_stand_for(name: str, case: str) -> None:
    layout = load([f"layouts/{name}.gin"]).make(Layout) if name != "whole" else WHOLE
    spec, search = CASES[case]
    output = decoded(spec, search, layout, change=quantize_weights)
    expected, stored = of_one_device(case)
    np.testing.assert_array_equal(output.tokens_BWT, expected.tokens_BWT)
    np.testing.assert_allclose(output.score_BW, expected.score_BW, rtol=1e-4)
    np.testing.assert_allclose(output.log_probability_BW, expected.log_probability_BW, rtol=1e-4)
    assert not np.allclose(output.score_BW, stored.score_BW, rtol=1e-4)  # they were rounded


def test_biases_by_distance_stay_as_they_are() -> None:
    model = dataclasses.replace(DECODER, positions=Relative()).model(WHOLE)
    with jax.set_mesh(make_mesh(WHOLE)):
        params = quantize_weights(model, model.init(jax.random.key(0)))
    leaves = jax.tree.leaves_with_path(params, is_leaf=is_rounded)
    kept = {leaf_path(path).split("/")[-1] for path, leaf in leaves if not is_rounded(leaf)}
    assert "bias_RJQ" in kept and not {"wq_DJQK", "wi_DF"} & kept


PRODUCTS = {"decoder": DECODER, "experts": dataclasses.replace(EXPERTS, tied=False)}
BATCH = packed_rows([[5, 3], [8], [7], [2, 6], [8], [4, 4], [1, 7], [8]], 24, 64)


@functools.cache
def first_weights(case: str) -> Params:
    """The same numbers for every layout, made once."""
    with jax.enable_x64(True), jax.set_mesh(make_mesh(WHOLE)):
        spec = dataclasses.replace(PRODUCTS[case], precision=FLOAT64)
        return jax.device_get(jax.jit(spec.model(WHOLE).init)(jax.random.key(0)))


@functools.cache
def loss_and_gradients(
    case: str, products: str, layout: Layout = WHOLE
) -> tuple[np.ndarray, Params]:
    """In float64, where round-off changes few of the rounded numbers."""
    with jax.enable_x64(True):
        precision = dataclasses.replace(FLOAT64, products=products)
    model = dataclasses.replace(PRODUCTS[case], precision=precision).model(layout)
    mesh = make_mesh(layout)

    def objective(params: Params, batch: Batch) -> jax.Array:
        return model.loss(params, batch, CROSS_ENTROPY).objective

    with jax.enable_x64(True), jax.set_mesh(mesh):
        params = jax.tree.map(
            lambda w, s: jax.device_put(w, NamedSharding(mesh, s.sharding.spec)),
            first_weights(case),
            jax.eval_shape(model.init, jax.random.key(0)),
        )
        batch = {
            name: jax.device_put(array, NamedSharding(mesh, layout.place(letters_of(name))))
            for name, array in BATCH.items()
        }
        return jax.device_get(jax.jit(jax.value_and_grad(objective))(params, batch))


@pytest.mark.few(2)
@pytest.mark.parametrize("name", LAYOUTS)
def test_no_layout_changes_rounded_products(name: str) -> None:
    layout = load([f"layouts/{name}.gin"]).make(Layout)
    case = "experts" if name.startswith("expert") else "decoder"
    expected, split = (loss_and_gradients(case, "int8", each) for each in (WHOLE, layout))
    for array, other in zip(*map(jax.tree.leaves, (split, expected)), strict=True):
        limit = ROUND_OFF * np.abs(other).max()
        np.testing.assert_allclose(array, other, rtol=0, atol=limit)


@pytest.mark.parametrize("products", ["int8", "fp8"])
def test_rounded_products_change_the_loss_a_little(products: str) -> None:
    loss, plain = (loss_and_gradients("decoder", each)[0] for each in (products, "compute"))
    assert ROUND_OFF * plain < abs(loss - plain) < 1e-3 * plain


def test_decoding_and_scoring_round_no_products() -> None:
    """Nor does the encoder, whose layers run as in training."""
    rounded, plain = (
        dataclasses.replace(PAIR, precision=Precision(products=products)).model(WHOLE)
        for products in ("int8", "compute")
    )
    batch = pair_rows([[5, 3], [8]], [[4, 2], [6]], PAIR.length, PAIR.vocab)
    source = {name: array for name, array in batch.items() if name in SOURCE_ARRAYS}

    @functools.partial(jax.jit, static_argnums=0)
    def cache_and_losses(model: TransformerModel, params: Params) -> tuple[Any, jax.Array]:
        cache = model.init_cache(model.prepare(params), source, 2, 4)
        return cache, model.token_losses(params, batch).loss_BL

    with jax.set_mesh(make_mesh(WHOLE)):
        computed, expected = (cache_and_losses(m, weights(PAIR)) for m in (rounded, plain))
    jax.tree.map(np.testing.assert_array_equal, computed, expected)


def test_products_with_weights_of_layers_are_rounded() -> None:
    """Not those of routers and logits, nor what multiplies no matrix."""
    pattern = EXPERTS.first_blocks + EXPERTS.pattern
    model = dataclasses.replace(EXPERTS, first_blocks=(), pattern=pattern).model(WHOLE)
    with jax.set_mesh(make_mesh(WHOLE)):
        _, layer = nnx.split(model.abstract().decoder.layers_N)
        marked = Precision(products="int8").to_products(jax.tree.map(jnp.zeros_like, layer))
    leaves = jax.tree.leaves_with_path(marked, is_leaf=is_rounded)
    rounded = {leaf_path(path).removesuffix("/value"): is_rounded(leaf) for path, leaf in leaves}
    attention = {f"attention/w{name}": True for name in ("k_DJK", "o_JQKD", "q_DJQK", "v_DJK")}
    norms = {"attention_norm/scale_D": False, "mlp_norm/scale_D": False}
    dense = {"mlp/wi_DF": True, "mlp/wo_FD": True}
    experts = {"mlp/router_DE": False, "mlp/wi_EDF": True, "mlp/wo_EFD": True}
    assert rounded == {
        f"block{i}/{name}": is_one
        for i, mlp in enumerate((dense, experts))
        for name, is_one in {**attention, **norms, **mlp}.items()
    }
