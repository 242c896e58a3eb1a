"""Sinusoids against numpy."""

import jax
import jax.numpy as jnp
import numpy as np

from layouts.mesh import make_mesh
from models.positions.sinusoidal import Sinusoidal
from tests.toys import WHOLE


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
