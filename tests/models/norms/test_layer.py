"""LayerNorm against numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from layouts.mesh import make_mesh
from models.initializers import Weights
from models.norms.layer import LayerNorm
from tests.toys import TOY, WHOLE

X_BLD = np.random.default_rng(0).normal(2, 3, (4, 8, 10)).astype(np.float32)
SCALE_D, BIAS_D = np.linspace(0.5, 2, 10), np.linspace(-1, 3, 10)


def expected() -> np.ndarray:
    """Ba et al. 2016, equation 4."""
    centered_BLD = X_BLD - X_BLD.mean(-1, keepdims=True)
    variance_BL1 = (centered_BLD**2).mean(-1, keepdims=True)
    return centered_BLD / np.sqrt(variance_BL1 + 0.5) * SCALE_D + BIAS_D


@pytest.mark.parametrize("bias", [True, False])
def test_the_norm_subtracts_the_mean_and_divides_by_the_deviation(bias: bool) -> None:
    with jax.set_mesh(make_mesh(WHOLE)):
        weights = Weights(WHOLE, TOY.sizes, nnx.Rngs(params=jax.random.key(0)), "float32")
        norm = LayerNorm(epsilon=0.5, bias=bias).build(WHOLE, weights)
        norm.scale_D[...] = jnp.asarray(SCALE_D, jnp.float32)
        if bias:
            norm.bias_D[...] = jnp.asarray(BIAS_D, jnp.float32)
        y_BLD = norm(jnp.asarray(X_BLD))
    np.testing.assert_allclose(y_BLD, expected() - (0 if bias else BIAS_D), rtol=1e-4, atol=1e-5)
