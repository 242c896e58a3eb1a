"""Gradients of biases equal numpy's, and devices exchange nothing but sums."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding

from layouts.hlo.program import CompiledText
from layouts.layout import Layout
from layouts.mesh import make_mesh
from models.attention.bias import Bias, bias_gradient

SHAPE, SEGMENTS = {"B": 4, "J": 2, "Q": 3, "L": 6, "M": 8}, 5
LAYOUTS = {
    "whole": Layout(mesh="x:1", rules=""),
    "summed": Layout(mesh="x:2,y:4", rules="batch:x;memory:y"),
    "kept": Layout(mesh="x:2,y:3", rules="heads:x;length:y"),
}


@pytest.mark.parametrize("id_axes", ["LM", "BLM"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_what_shares_an_id_is_added(name: str, id_axes: str) -> None:
    layout, rng = LAYOUTS[name], np.random.default_rng(0)
    mesh = make_mesh(layout)
    data = rng.normal(size=tuple(SHAPE.values())).astype(np.float32)
    ids = rng.integers(0, SEGMENTS, [SHAPE[letter] for letter in id_axes]).astype(np.int32)
    is_segment = np.eye(SEGMENTS)[ids]
    expected = np.einsum(f"BJQLM,{id_axes}R->RJQ", data, is_segment)

    def sums(data: jax.Array, ids: jax.Array) -> jax.Array:
        table_RJQ = layout.zeros((SEGMENTS, SHAPE["J"], SHAPE["Q"]), "rJQ", float)
        return bias_gradient(layout, Bias(table_RJQ, ids, None), data).table_RJQ

    with jax.set_mesh(mesh):
        placed = jax.device_put(data, NamedSharding(mesh, layout.place("BJQLM")))
        program = jax.jit(sums).lower(placed, ids).compile()
        computed = program(placed, ids)
    assert computed.sharding.spec == layout.place("RJQ")
    np.testing.assert_allclose(computed, expected, rtol=1e-5, atol=1e-5)
    sent = CompiledText.read(program.as_text() or "").collectives(mesh.shape)
    shard_bytes = computed.addressable_shards[0].data.nbytes
    assert [(c.kind, c.bytes) for c in sent] == [("all-reduce", shard_bytes)] * (name != "whole")
