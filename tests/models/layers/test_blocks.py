"""Blocks: residuals, and several blocks as one."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from configs.errors import UserError
from configs.spec import spec
from layouts.layout import Layout
from layouts.mesh import make_mesh
from models.attention.context import packed_context
from models.feed_forward.moe.layer import Moe
from models.initializers import Weights
from models.layers.blocks import BlockLayer, BlockSequence, Contexts
from models.parts import Block, Norm
from models.positions.rotary import Rotary
from tests.toys import WHOLE, toy

X_BLD = np.random.default_rng(0).normal(2, 3, (4, 8, 10)).astype(np.float32)
PATTERN = (Block(), Block(feed_forward=Moe(experts=5, d_ff=9)))
SPEC = toy(positions=Rotary(), pattern=PATTERN, dropout=0.2)


def weights() -> Weights:
    return Weights(WHOLE, SPEC.sizes, nnx.Rngs(params=jax.random.key(0)), "float32")


def contexts() -> tuple[Contexts]:
    ones_BL = jnp.ones(X_BLD.shape[:2], jnp.int32)
    positions_BL = jnp.cumsum(ones_BL, axis=1) - 1
    packed = packed_context(WHOLE, positions_BL, ones_BL)
    prepared = SPEC.positions.prepare(positions_BL, SPEC.d_kv)
    return (Contexts(dataclasses.replace(packed, prepared=prepared)),)


def test_parts_that_return_nothing_leave_the_residual_as_it_is() -> None:
    def run() -> jax.Array:
        block = BlockLayer(SPEC.blocks[0], SPEC, WHOLE, weights())
        for weight in (block.attention.wo_JQKD, block.mlp.wo_FD):
            weight[...] = 0 * weight[...]
        y_BLD, cache, load = block(jnp.asarray(X_BLD), contexts(), key=jax.random.key(0))
        assert cache is None and load is None
        return y_BLD

    with jax.set_mesh(make_mesh(WHOLE)):
        np.testing.assert_array_equal(jax.jit(run)(), X_BLD)


@spec
class NoResult(Norm):
    """Forgets to return what it builds."""

    def build(self, layout: Layout, weights: Weights) -> Any:
        weights.ones("D")


def test_a_norm_that_builds_nothing_is_named() -> None:
    spec = toy(norm=NoResult())
    with (
        jax.set_mesh(make_mesh(WHOLE)),
        pytest.raises(UserError, match=r"@NoResult\(\)\.build ret"),
    ):
        BlockLayer(spec.blocks[0], spec, WHOLE, weights())


def test_several_blocks_run_in_order_with_keys_of_their_own() -> None:
    key = jax.random.key(4)

    def run() -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        drawn = weights()
        blocks = BlockSequence([BlockLayer(parts, SPEC, WHOLE, drawn) for parts in SPEC.blocks])
        y_BLD, _, loads = blocks(jnp.asarray(X_BLD), contexts(), key=key)
        assert list(loads) == ["block0", "block1"] and loads["block0"] is None
        x_BLD = jnp.asarray(X_BLD)
        for index, block in enumerate(blocks.each().values()):
            x_BLD, _, load = block(x_BLD, contexts(), key=jax.random.fold_in(key, index))
        return y_BLD, x_BLD, loads["block1"].kept_e, load.kept_e

    with jax.set_mesh(make_mesh(WHOLE)):
        y_BLD, x_BLD, of_blocks_e, of_block_e = jax.jit(run)()
    np.testing.assert_allclose(y_BLD, x_BLD, rtol=1e-6)
    np.testing.assert_array_equal(of_blocks_e, of_block_e)
    assert np.sum(of_block_e) > 0
