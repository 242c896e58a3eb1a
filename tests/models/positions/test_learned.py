"""Learned positions against numpy."""

import jax
import jax.numpy as jnp
import numpy as np

from layouts.mesh import make_mesh
from models.positions.learned import Learned
from tests.toys import WHOLE


def test_rows_of_the_table_are_added_to_embeddings_and_scaled_with_them() -> None:
    rng = np.random.default_rng(0)
    x_BLD, table_LD = rng.normal(size=(4, 6, 10)), rng.normal(size=(8, 10))
    positions_BL = rng.integers(0, 8, (4, 6)).astype(np.int32)
    with jax.set_mesh(make_mesh(WHOLE)):
        x, table = (jnp.asarray(array, jnp.float32) for array in (x_BLD, table_LD))
        y_BLD = Learned().embed(WHOLE, x, jnp.asarray(positions_BL), table, 3.0)
    np.testing.assert_allclose(y_BLD, 3 * (x_BLD + table_LD[positions_BL]), rtol=0, atol=2e-5)
