"""A stack runs its blocks in order, whatever runs them, and shares what layers share."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from configs.errors import UserError
from layouts.cost.dataflow import executed_equations
from layouts.mesh import make_mesh
from models.attention.context import packed_context
from models.feed_forward.mlp import Mlp
from models.initializers import Weights
from models.layers.blocks import BlockLayer, Contexts
from models.layers.stack import Stack
from models.parts import BlockParts
from models.positions.relative import Relative
from models.positions.rotary import Rotary
from models.spec import TransformerSpec
from tests.toys import WHOLE, toy

X_BLD = np.random.default_rng(0).normal(size=(4, 8, 10)).astype(np.float32)
SPEC = toy(layers=3, positions=Relative(shared=True), dropout=0.2)


def made(spec: TransformerSpec) -> Stack:
    weights = Weights(WHOLE, spec.sizes, nnx.Rngs(params=jax.random.key(0)), "float32")
    stack = Stack(spec, WHOLE, weights)
    assert stack.bias is not None
    stack.bias.bias_RJQ[...] = jax.random.normal(jax.random.key(1), stack.bias.bias_RJQ.shape)
    return stack


def contexts(parts: BlockParts) -> Contexts:
    ones_BL, window = jnp.ones(X_BLD.shape[:2], jnp.int32), parts.attention.window
    positions_BL = jnp.cumsum(ones_BL, axis=1) - 1
    return Contexts(packed_context(WHOLE, positions_BL, ones_BL, window=window))


@pytest.mark.parametrize("scan", [False, True])
def test_layers_run_in_order_with_one_bias_and_keys_of_their_own(scan: bool) -> None:
    spec, key = dataclasses.replace(SPEC, scan=scan), jax.random.key(2)

    def run() -> tuple[jax.Array, jax.Array]:
        stack = made(spec)
        y_BLD, loads = stack(jnp.asarray(X_BLD), contexts, key=key)
        assert loads == {"layers_N": None}
        graph, weights = nnx.split(stack.layers_N)
        x_BLD = jnp.asarray(X_BLD)
        for index, layer in enumerate(WHOLE.unstack(weights)):
            block: BlockLayer = nnx.merge(graph, layer)
            shared = stack.contexts(contexts)
            x_BLD, _, _ = block(x_BLD, shared, key=jax.random.fold_in(key, index))
        return y_BLD, stack.norm(x_BLD)

    with jax.set_mesh(make_mesh(WHOLE)):
        y_BLD, x_BLD = jax.jit(run)()
    np.testing.assert_allclose(y_BLD, x_BLD, rtol=0, atol=2e-6)


def test_the_key_of_a_first_block_is_that_of_no_repeat() -> None:
    spec, key = dataclasses.replace(SPEC, first_blocks=SPEC.pattern), jax.random.key(2)

    def run() -> tuple[jax.Array, jax.Array]:
        stack = made(spec)
        y_BLD, _ = stack(jnp.asarray(X_BLD), contexts, key=key)
        graph, weights = nnx.split(stack.layers_N)
        [first] = stack.first.each().values()
        repeats = [nnx.merge(graph, layer) for layer in WHOLE.unstack(weights)]
        x_BLD, shared = jnp.asarray(X_BLD), stack.contexts(contexts)
        for number, block in zip((spec.layers, 0, 1), (first, *repeats), strict=True):
            x_BLD, _, _ = block(x_BLD, shared, key=jax.random.fold_in(key, number))
        return y_BLD, stack.norm(x_BLD)

    with jax.set_mesh(make_mesh(WHOLE)):
        y_BLD, x_BLD = jax.jit(run)()
    np.testing.assert_allclose(y_BLD, x_BLD, rtol=0, atol=2e-6)


@pytest.mark.parametrize("scan", [False, True])
def test_each_layer_has_a_cache_of_its_own(scan: bool) -> None:
    def start() -> Any:
        stack = made(dataclasses.replace(SPEC, scan=scan))
        weights = nnx.to_pure_dict(nnx.split(stack.layers_N)[1])
        return stack.init_cache(weights if scan else WHOLE.unstack(weights), 5, 9, None)

    with jax.set_mesh(make_mesh(WHOLE)):
        first, caches = jax.eval_shape(start)
    assert not first
    keys = [cache["keys_BJMK"].shape for cache in ([caches] if scan else caches)]
    assert keys == ([(3, 5, 3, 9, 4)] if scan else [(5, 3, 9, 4)] * 3)


@pytest.mark.parametrize("scan", [False, True])
def test_a_step_computes_angles_once_for_all_layers(scan: bool) -> None:
    spec = dataclasses.replace(SPEC, positions=Rotary(), scan=scan, remat="full")

    def objective(x_BLD: jax.Array) -> jax.Array:
        weights = Weights(WHOLE, spec.sizes, nnx.Rngs(params=jax.random.key(0)), "float32")
        stack = Stack(spec, WHOLE, weights)
        return jnp.sum(stack(x_BLD, contexts)[0])

    with jax.set_mesh(make_mesh(WHOLE)):
        traced = jax.jit(jax.grad(objective)).trace(jnp.asarray(X_BLD))
    sines = [
        times
        for eqn, times in executed_equations(traced.jaxpr.jaxpr)
        if eqn.primitive.name == "sin"
    ]
    assert sines == [1]


def products_of_a_gradient(spec: TransformerSpec) -> int:
    """Counts the products of the loss and its gradient, all layers together."""
    weights = Weights(WHOLE, spec.sizes, nnx.Rngs(params=jax.random.key(0)), "float32")
    graph, params = nnx.split(Stack(spec, WHOLE, weights))

    def objective(params: nnx.State, x_BLD: jax.Array) -> jax.Array:
        return jnp.sum(nnx.merge(graph, params)(x_BLD, contexts)[0])

    traced = jax.jit(jax.grad(objective, argnums=(0, 1))).trace(params, jnp.asarray(X_BLD))
    equations = executed_equations(traced.jaxpr.jaxpr)
    return sum(times for eqn, times in equations if eqn.primitive.name == "dot_general")


def test_remat_repeats_no_product_that_it_saves() -> None:
    # Layers read their inputs, so nothing needs the output of wo_FD again.
    products = {
        "query_proj": 1,
        "key_proj": 1,
        "value_proj": 1,
        "context": 1,
        "out_proj": 1,
        "mlpwi": 2,
    }
    spec = toy(layers=3, positions=Rotary(), feed_forward=Mlp(gated=True), remat="full")
    with jax.set_mesh(make_mesh(WHOLE)):
        repeats_all = products_of_a_gradient(spec)
        for name, count in products.items():
            saving = dataclasses.replace(spec, remat_saves=(name,))
            assert repeats_all - products_of_a_gradient(saving) == 3 * count, name


def test_only_full_rematerialization_saves_by_name() -> None:
    with pytest.raises(UserError, match="found remat = 'dots'"):
        toy(remat="dots", remat_saves=("out_proj",))
    with pytest.raises(
        UserError, match=r"remat_offloads = \('layer_input',\): found remat = 'none'"
    ):
        toy(remat_offloads=("layer_input",))
    with pytest.raises(UserError, match="out_proj also in remat_saves"):
        toy(remat="full", remat_saves=("out_proj",), remat_offloads=("out_proj",))
