"""LoRA: the first loss, gradients by merged weights, decoding, and what targets may be."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import traverse_util

from configs.errors import UserError
from layouts.axes import axes_of_path
from models.adapters.lora import ADAPTER, Lora
from models.api import Params
from models.attention.latent import Latent
from models.attention.multi_head import MultiHead
from models.feed_forward.mlp import Mlp
from models.feed_forward.moe.layer import Moe
from models.loss import CROSS_ENTROPY, token_weights
from models.parts import Block
from models.positions.relative import Relative
from models.positions.rotary import Rotary
from models.precision import Precision
from models.transformer import Transformer, TransformerModel
from tests.toys import FLOAT64, TOY, WHOLE, on_mesh, packed_rows, toy

LORA = Lora(rank=5, alpha=7.0, targets=("*",), store="float64")
GATED = Mlp(gated=True)
LATENT = Latent(latent=8, rotated=6, query_latent=9)
MODELS = {
    "gated": toy(feed_forward=GATED, positions=Relative(), tied=False, scan=True),
    "tied, combined": toy(attention=MultiHead(combined_qkv=True, biases="all")),
    "latent": toy(kv_heads=6, attention=LATENT, positions=Rotary()),
    "experts by einsum": toy(feed_forward=Moe(experts=4, d_ff=9, dispatch="einsum")),
    "dropless": toy(pattern=(Block(), Block(feed_forward=Moe(experts=4, dispatch="dropless")))),
}
ROWS = packed_rows([[8], [3, 5]], 8, 22)


def model_of(spec: Transformer, adapter: Lora = LORA) -> TransformerModel:
    return dataclasses.replace(spec, adapter=adapter).model(WHOLE)


def flat(params: Params) -> dict[str, np.ndarray]:
    return {path: np.asarray(x) for path, x in traverse_util.flatten_dict(params, sep="/").items()}


def trained(model: TransformerModel) -> Params:
    """Weights whose adapters matter."""
    params = model.init(jax.random.key(0))
    keys = iter(jax.random.split(jax.random.key(1), 100))
    adapter = jax.tree.map(
        lambda x: jax.random.normal(next(keys), x.shape, x.dtype) / 2, params[ADAPTER]
    )
    return params | {ADAPTER: adapter}


@pytest.mark.parametrize("products", ["compute", "int8"])
def test_new_adapters_change_no_bit_of_the_loss(products: Any) -> None:
    spec = toy(precision=Precision(products=products), scan=True)
    mesh, batch = on_mesh(WHOLE, ROWS)
    with jax.set_mesh(mesh):
        model, base = model_of(spec, Lora()), spec.model(WHOLE)
        params, expected = model.init(jax.random.key(3)), base.init(jax.random.key(3))
        losses = [
            jax.jit(m.loss, static_argnums=2)(p, batch, CROSS_ENTROPY).loss
            for m, p in ((model, params), (base, expected))
        ]
        other = jax.jit(model.loss, static_argnums=2)(trained(model), batch, CROSS_ENTROPY).loss
    adapter = flat(params.pop(ADAPTER))
    assert losses[0] == losses[1] != other
    assert all((x == 0).all() == ("/b_" in path) for path, x in adapter.items())
    assert len(adapter) == 12 and {x.dtype for x in adapter.values()} == {np.dtype("float32")}
    for path, weight in flat(expected).items():
        np.testing.assert_array_equal(flat(params)[path], weight)


@pytest.mark.few(1)
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_through_the_merged_weights(name: str) -> None:
    """By the chain rule of W + s A B: dA = s dW B^T and dB = s A^T dW."""
    spec = dataclasses.replace(MODELS[name], precision=FLOAT64)
    model, base = model_of(spec), spec.model(WHOLE)
    mesh, batch = on_mesh(WHOLE, ROWS)
    key = jax.random.key(4)
    with jax.set_mesh(mesh):
        params = trained(model)

        def loss(model: TransformerModel, params: Params) -> jax.Array:
            sums = model.loss(params, batch, CROSS_ENTROPY, key)
            return sums.total_objective(token_weights(batch))

        gradient = jax.jit(jax.grad(lambda adapter: loss(model, {**params, ADAPTER: adapter})))
        computed = flat({ADAPTER: gradient(params[ADAPTER])})
        merged = jax.jit(model.merged)(params)
        expected = flat(jax.jit(jax.grad(lambda params: loss(base, params)))(merged))
    before, whole = flat(params), flat(merged)
    changed = {path for path in whole if not np.array_equal(whole[path], before[path])}
    assert changed == {path for path, info in base.weights().items() if info.reads}
    for path in changed:
        info, axes, scale = base.weights()[path], axes_of_path(path), LORA.alpha / LORA.rank
        stem = f"{ADAPTER}/{path.rpartition('_')[0]}/"
        [(a_path, a), (b_path, b)] = sorted(x for x in before.items() if x[0].startswith(stem))
        a_axes, b_axes = axes_of_path(a_path), axes_of_path(b_path)
        assert info.reads and set(axes) == (set(a_axes) | set(b_axes)) - {"Z"}
        product = np.einsum(f"{a_axes},{b_axes}->{axes}", a, b)
        np.testing.assert_allclose(whole[path] - before[path], scale * product, atol=1e-12)
        dw = scale * expected[path]
        for to, other, equation in (
            (a_path, b, f"{axes},{b_axes}->{a_axes}"),
            (b_path, a, f"{axes},{a_axes}->{b_axes}"),
        ):
            correct = np.einsum(equation, dw, other)
            size = np.abs(correct).max()
            assert size > 0
            np.testing.assert_allclose(computed[to], correct, atol=1e-9 * size, err_msg=to)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["gated", "latent", "dropless"])
def test_decoding_reads_merged_weights(name: str) -> None:
    model, base = model_of(MODELS[name], Lora(targets=("*",))), MODELS[name].model(WHOLE)
    tokens, first = np.array([[3], [4]], np.int32), jnp.zeros((), jnp.int32)
    with jax.set_mesh(on_mesh(WHOLE, ROWS)[0]):
        params = trained(model)
        logits = []
        for each, weights in ((model, params), (base, jax.jit(model.merged)(params))):
            prepared = jax.jit(each.prepare)(weights)
            cache = each.init_cache(prepared, None, 2, 4)
            inputs = (jnp.asarray(tokens), jnp.zeros((2, 1), jnp.int32), jnp.ones((2, 1, 4), bool))
            logits.append(jax.jit(each.step)(prepared, cache, *inputs, first)[1])
    np.testing.assert_allclose(logits[0], logits[1], rtol=1e-5, atol=1e-5)


def test_what_no_weight_is_called() -> None:
    model = model_of(toy(), Lora(targets=("wq", "wqq", "scale")))
    with pytest.raises(UserError) as error:
        model.weights()
    assert str(error.value) == (
        "Lora.targets = ('wq', 'wqq', 'scale'): no weight has the name 'wqq'.  Did you mean wq?  "
        "Legal: attention/wk, attention/wo, attention/wq, attention/wv, embed, mlp/wi, mlp/wo, "
        "positions."
    )
    with pytest.raises(UserError, match="no weight has the name 'scale'"):
        model_of(toy(), Lora(targets=("scale",))).weights()


def test_adapters_without_targets_are_refused() -> None:
    with pytest.raises(UserError, match="trains nothing"):
        Lora(targets=())


@pytest.mark.parametrize("targets", [("wq",), ("w*",)])
def test_combined_products_round_the_weights_of_adapters_as_single_ones(targets: Any) -> None:
    """All three products, where one weight of three has an adapter as well."""
    precision, losses = Precision(products="int8"), []
    for combined in (True, False):
        spec = toy(precision=precision, attention=MultiHead(combined_qkv=combined))
        mesh, batch = on_mesh(WHOLE, ROWS)
        with jax.set_mesh(mesh):
            model = model_of(spec, Lora(targets=targets))
            run = jax.jit(model.loss, static_argnums=2)
            losses.append(run(trained(model), batch, CROSS_ENTROPY).loss)
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    ("target", "count"),
    [("wo", 2), ("attention/w[qv]", 2), ("mlp/*", 2), ("decoder/*", 6), ("w*", 6), ("*", 8)],
)
def test_targets_are_the_ends_of_paths(target: str, count: int) -> None:
    assert len(Lora(targets=(target,)).factors(TOY.model(WHOLE).weights())) == count


def test_routers_have_adapters_that_the_active_experts_lack() -> None:
    """Utilization counts the products of the experts of a token alone."""
    adapter = dataclasses.replace(LORA, targets=("router",))
    spec = dataclasses.replace(MODELS["experts by einsum"], adapter=adapter)
    assert len(adapter.factors(spec.model(WHOLE).weights())) == 1
    assert spec.active.model(WHOLE).weights()
