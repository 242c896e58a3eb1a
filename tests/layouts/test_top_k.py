"""The largest numbers of a split axis are those of the whole one, and among equals the first."""

import jax
import numpy as np
import pytest
from jax.extend.core import Jaxpr, jaxprs_in_params
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


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("rules", ["batch:y", "vocab:x"])
def test_a_long_axis_is_ranked_by_its_blocks(rules: str, k: int) -> None:
    size = 4 * 1031  # shards too: primes, so that numbers are left over after the blocks
    layout = Layout(mesh="y:2,x:4", rules=rules)
    mesh = make_mesh(layout)
    x_BV = np.random.default_rng(0).integers(0, 700, (4, size)).astype(np.float32)
    x_BV[0], x_BV[1] = 5, -np.inf  # all are equal
    x_BV[2, -k:] = 800  # the largest are the last
    order_BV = np.argsort(-x_BV, axis=-1, kind="stable")[:, :k]
    with jax.set_mesh(mesh):
        placed = jax.device_put(x_BV, NamedSharding(mesh, layout.place("BV")))
        ranked = jax.jit(lambda x_BV: layout.top_k(x_BV, k, "BV"))
        best_BU, index_BU = ranked(placed)
        longest = ranked_sizes(jax.make_jaxpr(ranked)(placed).jaxpr)
    np.testing.assert_array_equal(index_BU, order_BV)
    np.testing.assert_array_equal(best_BU, np.take_along_axis(x_BV, order_BV, axis=-1))
    assert max(longest) < size / 10


def ranked_sizes(jaxpr: Jaxpr) -> list[int]:
    """Returns the size of the axis that each top-k of a program ranks."""
    sizes = []
    for equation in jaxpr.eqns:
        if equation.primitive.name == "top_k":
            sizes.append(equation.invars[0].aval.shape[-1])
        for inner in jaxprs_in_params(equation.params):
            sizes += ranked_sizes(inner)
    return sizes
