"""Norms against numpy: of the residual width and of heads, with scales from 1 or from 0."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from layouts.mesh import make_mesh
from models.initializers import Weights
from models.norms import LayerNorm, RmsNorm, normed
from tests.toys import TOY, WHOLE

SPEC = RmsNorm(epsilon=0.5)
OFFSET = RmsNorm(epsilon=0.5, offset=True)
X_BLD = np.random.default_rng(0).normal(2, 3, (4, 8, 10)).astype(np.float32)
STORE = "optimization_barrier"
SCALE_D = np.linspace(0.5, 2, 10, dtype=np.float32)
BIAS_D = np.linspace(-1, 3, 10)


def weights() -> Weights:
    return Weights(WHOLE, TOY.sizes, nnx.Rngs(params=jax.random.key(0)), "float32")


def test_the_norm_divides_by_the_root_mean_square() -> None:
    """Zhang and Sennrich 2019, equation 4."""
    expected_BLD = X_BLD / np.sqrt(np.mean(X_BLD**2, axis=-1, keepdims=True) + 0.5) * SCALE_D
    for spec, start in ((SPEC, 1), (OFFSET, 0)):
        with jax.set_mesh(make_mesh(WHOLE)):
            norm = spec.build(WHOLE, weights())
            np.testing.assert_array_equal(norm.scale_D[...], np.full(10, start))
            norm.scale_D[...] = jnp.asarray(SCALE_D - 1 + start)
            np.testing.assert_allclose(norm(jnp.asarray(X_BLD)), expected_BLD, rtol=1e-5)


def test_each_head_is_normed_alone() -> None:
    x_BJMK = np.random.default_rng(1).normal(2, 3, (2, 3, 5, 4)).astype(np.float32)
    root_BJM1 = np.sqrt(np.mean(x_BJMK**2, axis=-1, keepdims=True) + 0.5)
    with jax.set_mesh(make_mesh(WHOLE)):
        norm = SPEC.build_for_heads(WHOLE, weights(), "K")
        norm.scale_K[...] = jnp.asarray(SCALE_D[:4])
        y_BJMK = norm(jnp.asarray(x_BJMK), "BJMK")
    np.testing.assert_allclose(y_BJMK, x_BJMK / root_BJM1 * SCALE_D[:4], rtol=1e-5)


def test_all_heads_are_normed_together() -> None:
    """As the whole width of the projection, which Hugging Face's OLMo 2 has."""
    x_BJQLK = np.random.default_rng(1).normal(2, 3, (2, 3, 2, 5, 4)).astype(np.float32)
    root_B11L1 = np.sqrt(np.mean(x_BJQLK**2, axis=(1, 2, 4), keepdims=True) + 0.5)
    scale_JQK = np.linspace(0.5, 2, 24, dtype=np.float32).reshape(3, 2, 4)
    with jax.set_mesh(make_mesh(WHOLE)):
        norm = SPEC.build_for_heads(WHOLE, weights(), "JQK")
        norm.scale_JQK[...] = jnp.asarray(scale_JQK)
        y_BJQLK = norm(jnp.asarray(x_BJQLK), "BJQLK")
    expected_BJQLK = x_BJQLK / root_B11L1 * scale_JQK[:, :, None]
    np.testing.assert_allclose(y_BJQLK, expected_BJQLK, rtol=1e-5)


def test_the_gradient_keeps_the_input_of_a_norm_in_its_type() -> None:
    """Intermediate values in float32 would be three times as many bytes as the input."""

    def residuals(x_BLD: jax.Array, scale_D: jax.Array) -> list[jax.Array]:
        def scaled(x_BLD: jax.Array, scale_D: jax.Array) -> jax.Array:
            return normed(WHOLE, x_BLD, scale_D, "BLD", SPEC.epsilon)

        return jax.tree.leaves(jax.vjp(scaled, x_BLD, scale_D)[1])

    with jax.set_mesh(make_mesh(WHOLE)):
        kept = jax.jit(residuals)(jnp.asarray(X_BLD, jnp.bfloat16), jnp.asarray(SCALE_D))
    assert {array.dtype.name for array in kept if array.shape == X_BLD.shape} == {"bfloat16"}


def test_the_gradient_of_a_norm_is_stored_before_the_norm_reads_it() -> None:
    """Otherwise a TPU's compiler computes it in every tile of the product that makes it."""

    def summed(x_BLD: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(SPEC.build(WHOLE, weights())(x_BLD)))

    with jax.set_mesh(make_mesh(WHOLE)):
        equations = jax.make_jaxpr(jax.grad(summed))(jnp.asarray(X_BLD)).eqns
    stored = [e.outvars[0].aval.shape for e in equations if e.primitive.name == STORE]
    assert stored == [X_BLD.shape, X_BLD.shape]  # what it returns, and its gradient


def expected_of_layer_norm() -> np.ndarray:
    """Ba et al. 2016, equation 4."""
    centered_BLD = X_BLD - X_BLD.mean(-1, keepdims=True)
    variance_BL1 = (centered_BLD**2).mean(-1, keepdims=True)
    return centered_BLD / np.sqrt(variance_BL1 + 0.5) * SCALE_D + BIAS_D


@pytest.mark.parametrize("bias", [True, False])
def test_the_norm_subtracts_the_mean_and_divides_by_the_deviation(bias: bool) -> None:
    with jax.set_mesh(make_mesh(WHOLE)):
        norm = LayerNorm(epsilon=0.5, bias=bias).build(WHOLE, weights())
        norm.scale_D[...] = jnp.asarray(SCALE_D, jnp.float32)
        if bias:
            norm.bias_D[...] = jnp.asarray(BIAS_D, jnp.float32)
        y_BLD = norm(jnp.asarray(X_BLD))
    np.testing.assert_allclose(
        y_BLD, expected_of_layer_norm() - (0 if bias else BIAS_D), rtol=1e-4, atol=1e-5
    )
