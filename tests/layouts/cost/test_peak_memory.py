"""Peak memory of small traces, counted by hand."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding

from layouts.cost.peak_memory import peak_bytes
from layouts.mesh import abstract_mesh

X = jnp.zeros((10, 10))  # of 400 bytes


def peak_of(function, *arguments) -> int:
    return peak_bytes(jax.make_jaxpr(function)(*arguments).jaxpr, {})


def test_what_products_read_is_stored_until_its_last_use() -> None:
    assert peak_of(lambda x: x @ x @ x @ x, X) == 800  # one in, one out

    def keeps_the_first(x):
        first = x @ x
        return x @ first @ x @ first

    assert peak_of(keeps_the_first, X) == 1200


def test_elementwise_operations_are_fused() -> None:
    assert peak_of(lambda x: jnp.cos(jnp.sin(x)), X) == 0  # into the result, which is the caller's
    assert peak_of(lambda x: jnp.sin(x) @ x, X) == 400
    # The sine takes the memory of the product, which nothing reads afterwards.
    assert peak_of(lambda x: jnp.sin(x @ x) @ x, X) == 400

    def reads_both(x):
        first = x @ x
        return jnp.sin(first) @ x @ x + first

    assert peak_of(reads_both, X) == 1200

    def sums_later(x):
        sine, other = jnp.sin(x @ x), x @ x @ x
        return sine.sum() * other

    assert peak_of(sums_later, X) == 1200  # no sine is stored, but the product until the sum


def test_a_product_is_stored_in_the_type_that_is_read() -> None:
    assert peak_of(lambda x: jnp.sin((x @ x).astype(jnp.bfloat16)) @ jnp.bfloat16(x), X) == 400


def test_a_loop_adds_the_peak_of_its_body_and_keeps_its_carry_in_place() -> None:
    def looped(x):
        return jax.lax.scan(lambda c, _: (jnp.sin(c @ c @ c), None), x @ x, None, length=5)[0]

    assert peak_of(looped, X) == 400 + 800


def test_of_branches_for_platforms_the_last_counts() -> None:
    def by_platform(x):
        return jax.lax.platform_dependent(
            x, cpu=lambda x: jnp.tile(x, 9) @ jnp.tile(x.T, 9).T, default=lambda x: x @ x @ x
        )

    assert peak_of(by_platform, X) == 4 + 400  # the platform, and what its branch stores


@pytest.mark.parametrize(("place", "gathered"), [((None, "y"), 0), (("x", "y"), 40 * 24 // 2 * 4)])
@pytest.mark.parametrize("products", [1, 2])
def test_what_products_gather_takes_memory(place, gathered: int, products: int) -> None:
    """Weights are gathered over x; those of a product until the next one ends."""
    mesh, rows = abstract_mesh({"x": 4, "y": 2}), jax.P("x", None)

    def layers(x, *weights):
        outs = [jnp.einsum("bd,df->bf", x, w, out_sharding=jax.P("x", "y")) for w in weights]
        return [out.sum() for out in outs]

    with jax.sharding.use_abstract_mesh(mesh):
        arguments = [
            jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))
            for shape, spec in [((64, 40), rows)] + [((40, 24), jax.P(*place))] * products
        ]
        jaxpr = jax.jit(layers).trace(*arguments).jaxpr.jaxpr
    out_bytes = 64 * 24 // 8 * 4
    assert peak_bytes(jaxpr, {"x": 4, "y": 2}) == products * (out_bytes + gathered)
