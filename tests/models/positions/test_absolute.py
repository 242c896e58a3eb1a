"""Learned positions and sinusoids against numpy."""

import jax
import jax.numpy as jnp
import numpy as np

from layouts.mesh import make_mesh
from models.positions.absolute import Learned, Sinusoidal
from tests.toys import WHOLE


def test_rows_of_the_table_are_added_to_embeddings_and_scaled_with_them() -> None:
    rng = np.random.default_rng(0)
    x_BLD, table_LD = rng.normal(size=(4, 6, 10)), rng.normal(size=(8, 10))
    positions_BL = rng.integers(0, 8, (4, 6)).astype(np.int32)
    with jax.set_mesh(make_mesh(WHOLE)):
        x, table = (jnp.asarray(array, jnp.float32) for array in (x_BLD, table_LD))
        y_BLD = Learned().embed(WHOLE, x, jnp.asarray(positions_BL), table, 3.0)
    np.testing.assert_allclose(y_BLD, 3 * (x_BLD + table_LD[positions_BL]), rtol=0, atol=2e-5)


def test_sines_and_cosines_of_growing_wavelengths_are_added_to_scaled_embeddings() -> None:
    """Vaswani et al. 2017, section 3.5: wavelengths from 2 pi to 10,000 x 2 pi."""
    rng = np.random.default_rng(0)
    x_BLD = rng.normal(size=(4, 6, 10)).astype(np.float32)
    positions_BL = rng.integers(0, 99, (4, 6)).astype(np.int32)
    angles_BLd = positions_BL[..., None] / 10_000.0 ** (np.arange(5) / 4)
    waves_BLD = np.concatenate([np.sin(angles_BLd), np.cos(angles_BLd)], axis=-1)
    with jax.set_mesh(make_mesh(WHOLE)):
        arrays = jnp.asarray(x_BLD), jnp.asarray(positions_BL)
        y_BLD = Sinusoidal().embed(WHOLE, *arrays, None, 3.0)
    np.testing.assert_allclose(y_BLD, 3 * x_BLD + waves_BLD, rtol=0, atol=2e-5)
