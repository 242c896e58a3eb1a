"""Attention against a numpy oracle, with its gradient, its masks, and under every kind of split."""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding

from layouts.layout import Layout
from layouts.mesh import make_mesh
from models.attention import Attention, cross_context, dot_product_attention, packed_context
from models.initializers import Weights
from models.positions import Bias
from tests.toys import WHOLE, toy

SHAPES = {"q_BJQLK": (4, 2, 3, 6, 5), "k_BJMK": (4, 2, 6, 5), "v_BJMK": (4, 2, 6, 5)}
BUCKETS = 9
BUCKETS_BLM = np.random.default_rng(2).integers(0, BUCKETS, (4, 6, 6))
SEGMENTS_BL = np.array([[1, 1, 2, 2, 2, 0], [1, 1, 1, 1, 1, 1], [1, 2, 3, 3, 0, 0], [1] * 6])


@pytest.fixture(autouse=True)
def one_device() -> Iterator[None]:
    with jax.set_mesh(make_mesh(WHOLE)):
        yield


def arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    made = {name: rng.normal(size=shape) for name, shape in SHAPES.items()}
    return made | {"table_RJQ": rng.normal(size=(BUCKETS, 2, 3))}


def mask_BLM() -> np.ndarray:
    same_BLM = SEGMENTS_BL[:, :, None] == SEGMENTS_BL[:, None, :]
    return same_BLM & np.tril(np.ones((6, 6), bool))


def reference(
    q_BJQLK: np.ndarray, k_BJMK: np.ndarray, v_BJMK: np.ndarray, table_RJQ: np.ndarray
) -> np.ndarray:
    """Attention one query at a time.  Vaswani et al. 2017, equation 1."""
    y_BJQLK = np.zeros(q_BJQLK.shape)
    for b, j, q, i in np.ndindex(*q_BJQLK.shape[:4]):
        keys = np.flatnonzero(mask_BLM()[b, i])
        logits = k_BJMK[b, j, keys] @ q_BJQLK[b, j, q, i] + table_RJQ[BUCKETS_BLM[b, i, keys], j, q]
        probs = np.exp(logits - logits.max())
        y_BJQLK[b, j, q, i] = probs / probs.sum() @ v_BJMK[b, j, keys]
    return y_BJQLK


def attend(
    q_BJQLK: jax.Array, k_BJMK: jax.Array, v_BJMK: jax.Array, table_RJQ: jax.Array
) -> jax.Array:
    values_BJQLM = jnp.transpose(jax.lax.stop_gradient(table_RJQ)[BUCKETS_BLM], (0, 3, 4, 1, 2))
    bias = Bias(table_RJQ, jnp.asarray(BUCKETS_BLM), values_BJQLM)
    mask_B11LM = jnp.asarray(mask_BLM())[:, None, None]
    return dot_product_attention(WHOLE, q_BJQLK, k_BJMK, v_BJMK, bias, mask_B11LM)


def test_attention_equals_the_oracle() -> None:
    given = arrays()
    y_BJQLK = jax.jit(attend)(**{k: v.astype(np.float32) for k, v in given.items()})
    np.testing.assert_allclose(y_BJQLK, reference(**given), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["q_BJQLK", "k_BJMK", "v_BJMK", "table_RJQ"])
def test_the_gradient_equals_differences_of_the_oracle(name: str) -> None:
    """The gradient is written by hand; differences of the oracle know nothing of it."""
    given, rng = arrays(), np.random.default_rng(1)
    dy_BJQLK = rng.normal(size=given["q_BJQLK"].shape)
    step = rng.normal(size=given[name].shape)

    def objective(x: jax.Array) -> jax.Array:
        small = {k: v.astype(np.float32) for k, v in given.items()}
        return jnp.vdot(attend(**(small | {name: x})), dy_BJQLK.astype(np.float32))

    def moved(size: float) -> float:
        return float(np.vdot(reference(**(given | {name: given[name] + size * step})), dy_BJQLK))

    gradient = np.asarray(jax.jit(jax.grad(objective))(given[name].astype(np.float32)))
    expected = (moved(1e-5) - moved(-1e-5)) / 2e-5
    np.testing.assert_allclose(np.vdot(gradient, step), expected, rtol=1e-3, atol=1e-3)


def test_a_packed_token_sees_its_own_segment_up_to_itself() -> None:
    segments_BL = jnp.asarray(SEGMENTS_BL, jnp.int32)
    causal = packed_context(WHOLE, segments_BL, segments_BL)
    np.testing.assert_array_equal(causal.mask_BLM, mask_BLM())
    np.testing.assert_array_equal(causal.segments_BL, SEGMENTS_BL)
    np.testing.assert_array_equal(causal.relative_positions[4], [4, 3, 2, 1, 0, -1])
    both = packed_context(WHOLE, segments_BL, segments_BL, causal=False)
    np.testing.assert_array_equal(both.mask_BLM, mask_BLM() | np.swapaxes(mask_BLM(), 1, 2))


def test_a_target_sees_the_whole_source_of_its_segment() -> None:
    segments_BM = jnp.asarray([[1, 2, 2, 0], [1, 1, 1, 1], [3, 1, 0, 0], [2, 2, 2, 2]], jnp.int32)
    context = cross_context(WHOLE, jnp.asarray(SEGMENTS_BL, jnp.int32), segments_BM)
    np.testing.assert_array_equal(context.mask_BLM[0, 2], [False, True, True, False])
    np.testing.assert_array_equal(context.mask_BLM[2, 3], [True, False, False, False])
    assert not context.mask_BLM[3].any() and not context.causal


SPLITS = {
    "batch and heads": Layout(mesh="data:2,model:2", rules="batch:data;heads:model"),
    "length": Layout(mesh="data:2,seq:4", rules="batch:data;length:seq"),
    "memory": Layout(mesh="x:4", rules="memory:x"),
    "memory and length": Layout(mesh="x:4,y:2", rules="memory:x;length:y"),
    "memory, or else length": Layout(mesh="x:4", rules="memory:x;length:x?"),
    "length, or else heads": Layout(mesh="x:2", rules="length:x;heads:x?"),
    "queries, or else memory": Layout(mesh="x:2,y:2", rules="queries:x;memory:x?;d_kv:y;length:y?"),
}
CHANGES: dict[str, dict[str, Any]] = {
    "rotary": {"positions": "rotary"},
    "rotary, chunks": {"positions": "rotary", "attention_chunks": 3},
    "relative, chunks": {"positions": "relative", "attention_chunks": 3},
    "relative, dropout": {"positions": "relative", "attention_dropout": 0.3},
}


def on_mesh(layout: Layout, mesh: jax.sharding.Mesh, axes: str, array: np.ndarray) -> jax.Array:
    return jax.device_put(array, NamedSharding(mesh, layout.place(axes)))


@functools.cache
def attention_and_gradients(layout: Layout, kind: str) -> dict[str, np.ndarray]:
    """The output of one attention layer, and its gradients, for random weights."""
    spec, rng = toy(heads=12, kv_heads=2, **CHANGES[kind]), np.random.default_rng(3)
    x_BLD, dy_BLD = rng.normal(size=(2, 4, 8, spec.d_model)).astype(np.float32)
    segments_BL = np.array([[1] * 8, [1] * 3 + [2] * 5, [1] * 6 + [0] * 2, [1, 2] + [3] * 6])

    def made() -> Attention:
        rngs = nnx.Rngs(params=jax.random.key(0))
        return Attention(spec, layout, Weights(layout, spec.sizes, rngs, "float32"))

    def objective(
        params: nnx.State, x_BLD: jax.Array, dy_BLD: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        segments = jnp.asarray(segments_BL, jnp.int32)
        context = packed_context(layout, layout.reshard(segments, "BL"), segments)
        y_BLD, _ = nnx.merge(graph, params)(x_BLD, context, key=jax.random.key(1))
        return jnp.sum(y_BLD * dy_BLD), y_BLD

    mesh = make_mesh(layout)
    with jax.set_mesh(mesh):
        graph, params = nnx.split(jax.eval_shape(made))
        draw = {leaf.shape: rng.normal(size=leaf.shape) for leaf in jax.tree.leaves(params)}
        params = jax.tree.map(
            lambda leaf: jax.device_put(
                draw[leaf.shape].astype(np.float32), NamedSharding(mesh, leaf.sharding.spec)
            ),
            params,
        )
        placed = (on_mesh(layout, mesh, "BLD", array) for array in (x_BLD, dy_BLD))
        gradient = jax.jit(jax.grad(objective, argnums=(0, 1), has_aux=True))
        (dparams, dx_BLD), y_BLD = jax.device_get(gradient(params, *placed))
    return {"x_BLD": dx_BLD, "y_BLD": y_BLD, **nnx.to_pure_dict(dparams)}


@pytest.mark.parametrize("kind", CHANGES)
@pytest.mark.parametrize("name", SPLITS)
def test_splits_of_length_and_memory_change_nothing(name: str, kind: str) -> None:
    expected = attention_and_gradients(WHOLE, kind)
    arrays = attention_and_gradients(SPLITS[name], kind)
    jax.tree.map(
        lambda array, whole: np.testing.assert_allclose(
            array, whole, rtol=0, atol=3e-6 * np.abs(whole).max()
        ),
        arrays,
        expected,
    )
    assert all(np.abs(array).max() > 0.1 for array in jax.tree.leaves(expected))
