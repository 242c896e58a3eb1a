"""Gradients that devices add up later are those that they add up at once."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layouts.layout import Layout
from layouts.mesh import make_mesh
from layouts.padding import with_padding
from layouts.reduction import defer_sum, scaled, zero_gradient
from layouts.shards import mesh_axes, spec_of

ROWS, LENGTH, WIDTH, HIDDEN = 8, 4, 12, 6
LAYOUTS = {
    "rows": Layout(mesh="x:4,y:2", rules="batch:x"),
    "rows over two": Layout(mesh="x:4,y:2", rules="batch:x;batch:y"),
    "rows and weights": Layout(mesh="x:4,y:2", rules="batch:x;d_ff:y"),
    "rows and sums": Layout(mesh="x:4,y:2", rules="batch:x;d_model:y?", param_rules="d_model:y"),
    "positions": Layout(mesh="x:4,y:2", rules="batch:x;length:y"),
    "positions where free": Layout(mesh="x:4,y:2", rules="batch:x;d_ff:y;length:y?"),
    "positions where free, other shards": Layout(
        mesh="x:2,y:2,z:2", rules="batch:x;d_ff:y;length:y?", param_rules="d_ff:z"
    ),
    "rows of one device": Layout(mesh="x:1,y:8", rules="batch:x;batch:y"),
    "no rows": Layout(mesh="x:4,y:2", rules="length:y"),
}  # fmt: skip
CASES = [
    ("rows", {"x"}), ("rows over two", {"x", "y"}), ("positions", {"x", "y"}),
    ("rows of one device", {"y"}),
]  # fmt: skip
Function = Callable[[Layout, jax.Array, jax.Array], jax.Array]


def product(layout: Layout, w_DF: jax.Array, x_BLD: jax.Array) -> jax.Array:
    return layout.einsum("BLD,DF->BLF", layout.reshard(x_BLD, "BLD"), w_DF)


def summing_product(layout: Layout, w_DF: jax.Array, x_BLD: jax.Array) -> jax.Array:
    x_BLD = layout.reshard(x_BLD, "BLD")
    return layout.einsum("BLF,DF->BLD", jnp.sin(product(layout, w_DF, x_BLD)), w_DF)


def product_of_whole_rows(layout: Layout, w_DF: jax.Array, x_BLD: jax.Array) -> jax.Array:
    """As the loss takes rows in slices: their tokens are split over fewer mesh axes."""
    return layout.einsum("BlD,DF->BlF", layout.reshard(x_BLD, "BlD"), w_DF)


def lookup(layout: Layout, w_DF: jax.Array, x_BLD: jax.Array) -> jax.Array:
    ids_BL = layout.reshard(jnp.abs(10 * x_BLD[:, :, 0]).astype(jnp.int32) % WIDTH, "BL")
    return layout.take(w_DF, ids_BL, "BLF")


def deferred(layout: Layout, w_DF: jax.Array) -> jax.Array:
    rows, columns = map(mesh_axes, layout.place("BL"))
    return defer_sum(w_DF, rows, (*rows, *columns))


def test_zeros_are_never_whole_on_a_device() -> None:
    layout = Layout(mesh="x:4,y:2", rules="batch:x;batch:y", param_rules="d_model:x")
    with jax.set_mesh(make_mesh(layout)):
        w_DF = layout.reshard(jnp.zeros((WIDTH, HIDDEN)), "DF", stored=True)
        traced = jax.jit(lambda w_DF: zero_gradient(w_DF, jnp.float32)).trace(w_DF)
    places = [v.aval.sharding.spec for eqn in traced.jaxpr.eqns for v in eqn.outvars]
    assert places and all(mesh_axes(place.partitions[0]) == ("x",) for place in places)


def gradients(layout: Layout, function: Function) -> tuple[jax.Array, jax.Array]:
    """Returns the gradient of a weight, and the same by a deferred sum."""
    rng = np.random.default_rng(0)
    x_BLD = jnp.asarray(rng.normal(size=(ROWS, LENGTH, WIDTH)), float)
    w_DF = layout.reshard(jnp.asarray(rng.normal(size=(WIDTH, HIDDEN)), float), "DF", stored=True)

    def objective(w_DF: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(function(layout, w_DF, x_BLD)))

    at_once = jax.jit(jax.grad(objective))(w_DF)
    later = jax.jit(lambda w_DF: jax.grad(objective)(deferred(layout, w_DF)))(w_DF)
    return at_once, later


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize(
    "function", [product, summing_product, product_of_whole_rows, lookup], ids=lambda f: f.__name__
)
def test_a_deferred_sum_is_the_same_gradient(name: str, function: Function) -> None:
    layout = LAYOUTS[name]
    with jax.enable_x64(True), jax.set_mesh(make_mesh(layout)):
        at_once, later = gradients(layout, function)
        expected, computed = (
            np.asarray(jax.sharding.reshard(g, jax.P())) for g in (at_once, later)
        )
    assert np.abs(expected).max() > 0.1
    np.testing.assert_allclose(computed, expected, rtol=0, atol=1e-12)


def test_devices_keep_their_parts_of_a_sum_where_the_weight_is_whole() -> None:
    for name, axes in CASES:
        with jax.set_mesh(make_mesh(LAYOUTS[name])):
            for function in (product, lookup):
                _, later = gradients(LAYOUTS[name], function)
                assert spec_of(later).unreduced == axes


def test_a_weight_that_is_split_as_rows_are_is_added_up_at_once() -> None:
    layout = Layout(mesh="x:4,y:2", rules="batch:x;batch:y", param_rules="d_model:x")
    with jax.set_mesh(make_mesh(layout)):
        at_once, later = gradients(layout, product)
        assert spec_of(later) == spec_of(at_once) == jax.P("x", None)


def test_mesh_axes_of_one_device_defer_nothing() -> None:
    layout = Layout(mesh="x:1,y:8", rules="batch:x;d_ff:y")
    with jax.set_mesh(make_mesh(layout)):
        w_DF = layout.reshard(jnp.zeros((WIDTH, 8)), "DF")
        assert spec_of(deferred(layout, w_DF)) == spec_of(w_DF)


def test_padding_and_views_keep_what_is_deferred() -> None:
    layout = with_padding(Layout(mesh="x:4,y:2", rules="batch:x;d_ff:y+"), F=5)
    with jax.set_mesh(make_mesh(layout)):
        stored_DF = layout.reshard(jnp.ones((3, WIDTH, 5)), "NDF", stored=True)
        w_NDF = deferred(layout, stored_DF)
        parts = [*layout.unstack(w_NDF), layout.gather_stack(w_NDF), layout.reshard(w_NDF, "ndF")]
        assert {spec_of(part).reduced for part in parts} == {frozenset("x")}


def test_unreduced_arrays_are_scaled_and_added_to_zeros() -> None:
    layout = LAYOUTS["rows"]
    with jax.set_mesh(make_mesh(layout)):
        _, later = gradients(layout, product)
        w_DF = deferred(layout, layout.reshard(jnp.zeros((WIDTH, HIDDEN)), "DF", stored=True))
        total = zero_gradient(w_DF, float) + scaled(later, jnp.asarray(0.5))
        assert spec_of(total).unreduced == {"x"}
        halves, whole = (np.asarray(jax.sharding.reshard(x, jax.P())) for x in (total, later))
    np.testing.assert_allclose(halves, whole / 2, rtol=1e-6)
