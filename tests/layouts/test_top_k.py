"""The largest numbers of a split axis are those of the whole one, and among equals the first."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding

from layouts.layout import Layout
from layouts.mesh import make_mesh


@pytest.mark.parametrize("k", [1, 3, 5])  # a shard has four numbers
@pytest.mark.parametrize("rules", ["", "vocab:x", "batch:y;vocab:x", "vocab:y;vocab:x"])
def test_numbers_and_indices_are_those_of_a_stable_sort(rules: str, k: int) -> None:
    layout = Layout(mesh="y:2,x:4", rules=rules)
    mesh = make_mesh(layout)
    x_BV = np.random.default_rng(0).integers(0, 6, (2, 16)).astype(np.float32)  # many are equal
    order_BV = np.argsort(-x_BV, axis=-1, kind="stable")[:, :k]
    with jax.set_mesh(mesh):
        placed = jax.device_put(x_BV, NamedSharding(mesh, layout.place("BV")))
        best_BU, index_BU = jax.jit(lambda x_BV: layout.top_k(x_BV, k, "BV"))(placed)
    np.testing.assert_array_equal(index_BU, order_BV)
    np.testing.assert_array_equal(best_BU, np.take_along_axis(x_BV, order_BV, axis=-1))
    assert best_BU.sharding.spec == jax.P(layout.place("BV")[0], None)
