"""Relative buckets as T5 has them, and the gradient of the bias, summed before it is sent."""

import contextlib
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding

from configs.errors import UserError
from layouts.hlo.program import CompiledText
from layouts.layout import Layout
from layouts.mesh import make_mesh
from models.attention.plain import Operands, dot_product_attention, unnormalized_probs
from models.initializers import Weights
from models.positions.relative import Relative, RelativeBias, relative_buckets
from tests.toys import TOY, WHOLE, toy

SPEC = Relative(buckets=7, max_distance=20)
ROWS, LENGTH = 4, 24
SHAPES = {"BJQLK": (ROWS, 3, 2, LENGTH, 5), "BJMK": (ROWS, 3, LENGTH, 5), "RJQ": (7, 3, 2)}
LAYOUTS = {
    "batch": Layout(mesh="x:4", rules="batch:x"),
    "length": Layout(mesh="x:4", rules="length:x"),
    "batch and heads": Layout(mesh="x:2,y:3", rules="batch:x;heads:y"),
    "stored heads": Layout(mesh="x:2,y:3", rules="batch:x", param_rules="heads:y"),
}


def test_buckets_are_exact_while_near_and_logarithmic_beyond() -> None:
    """T5's: of 8 causal buckets 4 are exact; distances from 4 to 16 share the others."""
    distances = jnp.array([-3, 0, 1, 3, 4, 5, 6, 8, 11, 12, 16, 99])
    causal = relative_buckets(distances, 8, 16, causal=True)
    np.testing.assert_array_equal(causal, [0, 0, 1, 3, 4, 4, 5, 6, 6, 7, 7, 7])
    both = relative_buckets(jnp.array([-99, -2, -1, 0, 1, 2, 99]), 8, 16, causal=False)
    np.testing.assert_array_equal(both, [7, 6, 5, 0, 1, 2, 3])


def test_some_distances_are_beyond_the_exact_ones() -> None:
    with pytest.raises(UserError) as error:
        Relative(buckets=32, max_distance=16)
    assert (
        "Relative.max_distance = 16: 32 buckets hold the distances below 16 exactly.  Legal: "
        "max_distance of at least 17, or at most 31 buckets."
    ) in str(error.value)


@pytest.mark.parametrize("has_encoder", [False, True])
def test_every_legal_number_of_buckets_is_filled_in_order(has_encoder: bool) -> None:
    """Each distance has a bucket of the table, the next one the same bucket or the next one."""
    for buckets, max_distance in itertools.product(range(1, 14), range(1, 16)):
        with contextlib.suppress(UserError):
            positions = Relative(buckets=buckets, max_distance=max_distance)
            toy(positions=positions, encoder_layers=2 * has_encoder)
            distances = np.arange(20)
            for causal in (True, not has_encoder):
                computed = np.asarray(relative_buckets(distances, buckets, max_distance, causal))
                last = buckets - 1 if causal else buckets // 2 - 1
                assert computed[0] == 0 and computed[max_distance] == computed[-1] == last
                assert (np.diff(computed) >= 0).all()


@functools.cache
def table_gradient(layout: Layout, divides_late: bool) -> tuple[CompiledText, np.ndarray]:
    """The compiled gradient of attention by the table of biases, and its value."""
    mesh, rng = make_mesh(layout), np.random.default_rng(0)
    draw = {axes: rng.normal(size=shape).astype(np.float32) for axes, shape in SHAPES.items()}
    places = {axes: layout.place(axes, stored=axes == "RJQ") for axes in draw}
    arrays = [jax.device_put(draw[axes], NamedSharding(mesh, places[axes])) for axes in draw]

    def objective(q_BJQLK: jax.Array, k_BJMK: jax.Array, table_RJQ: jax.Array) -> jax.Array:
        rngs = nnx.Rngs(params=jax.random.key(0))
        module = RelativeBias(SPEC, layout, Weights(layout, TOY.sizes, rngs, "float32"))
        module.bias_RJQ[...] = table_RJQ
        query_LM, key_LM = (layout.iota("LM", (LENGTH, LENGTH), letter) for letter in "LM")
        bias = module(query_LM - key_LM, causal=True)
        mask_11LM = layout.broadcast_like(query_LM >= key_LM, "LM", "BJQLM")
        operands = Operands(q_BJQLK, k_BJMK, k_BJMK, bias, mask_11LM)
        if divides_late:
            y_BJQLK = dot_product_attention(layout, operands)
        else:
            probs_BJQLM, _ = unnormalized_probs(layout, operands)
            y_BJQLK = layout.einsum("BJQLM,BJMK->BJQLK", probs_BJQLM, k_BJMK)
        return jnp.sum(jnp.square(y_BJQLK))

    with jax.set_mesh(mesh):
        program = jax.jit(jax.grad(objective, argnums=2)).lower(*arrays).compile()
        return CompiledText.read(program.as_text() or ""), np.asarray(program(*arrays))


@pytest.mark.parametrize("divides_late", [True, False], ids=["by hand", "by JAX"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_one_number_per_head_and_bucket_crosses_devices(name: str, divides_late: bool) -> None:
    layout = LAYOUTS[name]
    program, gradient_RJQ = table_gradient(layout, divides_late)
    _, whole_RJQ = table_gradient(WHOLE, divides_late)
    np.testing.assert_allclose(gradient_RJQ, whole_RJQ, rtol=0, atol=3e-6 * whole_RJQ.max())
    assert np.abs(whole_RJQ).min() > 1e-3
    sums = [
        collective
        for collective in program.collectives(make_mesh(layout).shape)
        if collective.kind != "all-gather"  # of keys, where queries are split
    ]
    shard_bytes = whole_RJQ.nbytes // (3 if name == "batch and heads" else 1)
    assert [(c.kind, c.bytes) for c in sums] == [("all-reduce", shard_bytes)]
