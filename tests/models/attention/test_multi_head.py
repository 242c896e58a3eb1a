"""One attention layer, and its gradients, under every kind of split."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding

from layouts.layout import Layout
from layouts.mesh import make_mesh
from models.attention.context import packed_context
from models.attention.multi_head import MultiHead, MultiHeadAttention
from models.initializers import Weights
from models.norms import RmsNorm
from models.positions.relative import Relative
from models.positions.rotary import Rotary
from tests.toys import WHOLE, toy

SPLITS = {
    "batch and heads": Layout(mesh="data:2,model:2", rules="batch:data;heads:model"),
    "length": Layout(mesh="data:2,seq:4", rules="batch:data;length:seq"),
    "memory": Layout(mesh="x:4", rules="memory:x"),
    "memory and length": Layout(mesh="x:4,y:2", rules="memory:x;length:y"),
    "memory, or else length": Layout(mesh="x:4", rules="memory:x;length:x?"),
    "length, or else heads": Layout(mesh="x:2", rules="length:x;heads:x?"),
    "heads, or else length": Layout(mesh="x:2", rules="heads:x?;length:x?"),
    "queries, or else memory": Layout(mesh="x:2,y:2", rules="queries:x;memory:x?;d_kv:y;length:y?"),
}
CHANGES: dict[str, dict[str, Any]] = {
    "rotary": {"positions": Rotary()},
    "rotary, chunks": {"positions": Rotary(), "attention": MultiHead(chunks=3)},
    "relative, chunks": {"positions": Relative(), "attention": MultiHead(chunks=3)},
    "relative, dropout": {"positions": Relative(), "attention": MultiHead(dropout=0.3)},
    "window, norms, biases": {
        "attention": MultiHead(window=3, qk_norm=True, biases="all"),
        "norm": RmsNorm(offset=True),
    },
}
WINDOW_SPLITS = ("batch and heads", "queries, or else memory")
CHUNK_SPLITS = ("heads, or else length",)  # the length of distances, where heads split the logits


@pytest.mark.parametrize(("query_scale", "factor"), [(None, 0.5), (2.0, 2.0)])
def test_queries_have_their_scale(query_scale: float | None, factor: float) -> None:
    spec = toy(d_kv=4, attention=MultiHead(query_scale=query_scale))
    q_BLJQK = np.random.default_rng(0).normal(size=(5, 7, 3, 2, 4)).astype(np.float32)
    with jax.set_mesh(make_mesh(WHOLE)):
        weights = Weights(WHOLE, spec.sizes, nnx.Rngs(params=jax.random.key(0)), "float32")
        layer = MultiHeadAttention(spec.attention, spec.blocks[0], spec, WHOLE, weights)
        q_BJQLK = layer.to_queries(jnp.asarray(q_BLJQK))
    np.testing.assert_allclose(q_BJQLK, factor * np.transpose(q_BLJQK, (0, 2, 3, 1, 4)))


def on_mesh(layout: Layout, mesh: jax.sharding.Mesh, axes: str, array: np.ndarray) -> jax.Array:
    return jax.device_put(array, NamedSharding(mesh, layout.place(axes)))


@functools.cache
def attention_and_gradients(layout: Layout, kind: str) -> dict[str, np.ndarray]:
    """The output of one attention layer, and its gradients, for random weights."""
    spec, rng = toy(heads=12, kv_heads=2, **CHANGES[kind]), np.random.default_rng(3)
    x_BLD, dy_BLD = rng.normal(size=(2, 4, 8, spec.d_model)).astype(np.float32)
    segments_BL = np.array([[1] * 8, [1] * 3 + [2] * 5, [1] * 6 + [0] * 2, [1, 2] + [3] * 6])

    def made() -> MultiHeadAttention:
        weights = Weights(layout, spec.sizes, nnx.Rngs(params=jax.random.key(0)), "float32")
        return MultiHeadAttention(spec.attention, spec.blocks[0], spec, layout, weights)

    def objective(
        params: nnx.State, x_BLD: jax.Array, dy_BLD: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        segments = jnp.asarray(segments_BL, jnp.int32)
        positions_BL = layout.reshard(segments, "BL")
        context = dataclasses.replace(
            packed_context(layout, positions_BL, segments, window=spec.attention.window),
            prepared=spec.positions.prepare(positions_BL, spec.d_kv),
        )
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


@pytest.mark.few(9)
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (kind, name)
        for kind in CHANGES
        for name in (WINDOW_SPLITS if kind.startswith("window") else SPLITS)
        if kind == "relative, chunks" or name not in CHUNK_SPLITS
    ],
)
def test_splits_of_length_and_memory_change_nothing(kind: str, name: str) -> None:
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
