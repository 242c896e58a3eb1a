"""The feed-forward layer against numpy, and what its dropout leaves alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from layouts.cost.dataflow import executed_equations
from layouts.mesh import make_mesh
from models.feed_forward.mlp import Activation, Mlp, MlpLayer
from models.initializers import Weights
from tests.toys import TOY, WHOLE, toy

X_BLD = np.random.default_rng(0).normal(size=(4, 6, 10)).astype(np.float32)
ACTIVATIONS = {
    "relu": lambda h: np.maximum(h, 0),
    "silu": lambda h: h / (1 + np.exp(-h)),
    "gelu": lambda h: h / 2 * (1 + np.tanh((2 / np.pi) ** 0.5 * (h + 0.044715 * h**3))),
}


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_layer_equals_numpys(activation: Activation, gated: bool) -> None:
    """Vaswani et al. 2017, equation 2; Shazeer 2020, equation 5, without biases."""
    spec = Mlp(activation=activation, gated=gated)
    with jax.set_mesh(make_mesh(WHOLE)):
        rngs = nnx.Rngs(params=jax.random.key(0))
        layer = MlpLayer(spec, TOY, WHOLE, Weights(WHOLE, TOY.sizes, rngs, "float32"))
        y_BLD, load = layer(X_BLD, None)
    h_BLF, activate = X_BLD @ np.asarray(layer.wi_DF[...]), ACTIVATIONS[activation]
    h_BLF = activate(X_BLD @ np.asarray(layer.wg_DF[...])) * h_BLF if gated else activate(h_BLF)
    np.testing.assert_allclose(y_BLD, h_BLF @ np.asarray(layer.wo_FD[...]), rtol=1e-4, atol=1e-5)
    assert load is None


@pytest.mark.parametrize("rates", [(0.5, None), (0.0, 0.5)])
def test_dropout_is_of_hidden_units(rates: tuple[float, float | None]) -> None:
    spec, model = Mlp(dropout=rates[1]), toy(dropout=rates[0])
    with jax.set_mesh(make_mesh(WHOLE)):
        rngs = nnx.Rngs(params=jax.random.key(0))
        layer = MlpLayer(spec, model, WHOLE, Weights(WHOLE, model.sizes, rngs, "float32"))
        whole_BLD, _ = layer(X_BLD, None)
        dropped_BLD, _ = layer(X_BLD, None, key=jax.random.key(1))
    assert not np.any(np.isclose(dropped_BLD, 0) & ~np.isclose(whole_BLD, 0))
    assert np.mean(~np.isclose(dropped_BLD, whole_BLD)) > 0.9


def test_hidden_dropout_may_be_off_by_itself() -> None:
    spec, model = Mlp(dropout=0.0), toy(dropout=0.5)
    with jax.set_mesh(make_mesh(WHOLE)):
        rngs = nnx.Rngs(params=jax.random.key(0))
        layer = MlpLayer(spec, model, WHOLE, Weights(WHOLE, model.sizes, rngs, "float32"))
        np.testing.assert_array_equal(
            layer(X_BLD, None, key=jax.random.key(1))[0], layer(X_BLD, None)[0]
        )


def test_gated_products_and_their_gradients_are_computed_once_and_stored() -> None:
    spec, (h_BLF, gate_BLF) = Mlp(activation="silu", gated=True), jnp.stack([X_BLD, 2 - X_BLD])

    def gated(h_BLF: jax.Array, gate_BLF: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(spec.activate(h_BLF, gate_BLF)))

    def plain(h_BLF: jax.Array, gate_BLF: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(jax.nn.silu(gate_BLF) * h_BLF))

    computed, expected = (
        jax.jit(jax.grad(f, argnums=(0, 1)))(h_BLF, gate_BLF) for f in (gated, plain)
    )
    np.testing.assert_allclose(computed, expected, rtol=0, atol=1e-6)
    traced = jax.jit(jax.grad(gated, argnums=(0, 1))).trace(h_BLF, gate_BLF)
    stored = [
        [v.aval.shape for v in eqn.outvars]
        for eqn, _ in executed_equations(traced.jaxpr.jaxpr)
        if eqn.primitive.name == "optimization_barrier"
    ]
    both, product = [h_BLF.shape, gate_BLF.shape], [h_BLF.shape]
    assert stored == [both, product, product, both]
