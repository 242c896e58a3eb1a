"""Rotation of queries and keys against complex numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs.errors import UserError
from layouts.mesh import make_mesh
from models.positions.rotary import LinearScaling, Rotary, swap_by_product
from tests.toys import WHOLE


def test_rotation_multiplies_pairs_by_complex_numbers_and_its_gradient_divides() -> None:
    rng, width = np.random.default_rng(0), 6
    x_BJMK, dy_BJMK = rng.normal(size=(2, 2, 3, 5, width)).astype(np.float32)
    positions_BM = rng.integers(0, 99, (2, 5)).astype(np.int32)
    angles = positions_BM[:, None, :, None] * 10_000.0 ** (-2 * np.arange(3) / width)

    def times(x: np.ndarray, turn: np.ndarray) -> np.ndarray:
        turned = (x[..., :3] + 1j * x[..., 3:]) * turn
        return np.concatenate([turned.real, turned.imag], axis=-1)

    def rotated(x_BJMK: jax.Array) -> jax.Array:
        rotation = Rotary().prepare(jnp.asarray(positions_BM), width)
        return Rotary().rotate(WHOLE, x_BJMK, "BJMK", rotation)

    with jax.set_mesh(make_mesh(WHOLE)):
        y_BJMK, pull = jax.vjp(rotated, jnp.asarray(x_BJMK))
        (dx_BJMK,) = pull(jnp.asarray(dy_BJMK))
    np.testing.assert_allclose(y_BJMK, times(x_BJMK, np.exp(1j * angles)), rtol=0, atol=2e-5)
    np.testing.assert_allclose(dx_BJMK, times(dy_BJMK, np.exp(-1j * angles)), rtol=0, atol=2e-5)


def test_wavelengths_that_are_scaled_grow() -> None:
    with pytest.raises(
        UserError,
        match=r"Rotary.theta = 1.0: found @LinearScaling\(\) as scaling.  Legal: above 1.",
    ):
        Rotary(theta=1.0, scaling=LinearScaling(factor=2.0))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_a_product_swaps_halves_exactly(dtype: jnp.dtype) -> None:
    x = jax.random.normal(jax.random.key(0), (3, 5, 6), dtype)
    np.testing.assert_array_equal(swap_by_product(x), jnp.roll(x, 3, axis=-1).astype(jnp.float32))
