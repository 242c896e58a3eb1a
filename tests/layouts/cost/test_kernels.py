"""The FLOPs of attention kernels, counted by hand from their masks and blocks."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel as splash,
)
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

from layouts.cost.dataflow import flops_by_kernel
from models.attention.triton import jax_kernels
from tests.toys import optax_promotion

B, H, L, K, BLOCK = 2, 3, 1024, 64, 256
WHOLE_PRODUCT = 2 * B * H * L * L * K
# Of L / BLOCK blocks in a row, those up to the diagonal.
UP_TO_DIAGONAL = (L // BLOCK + 1) / (2 * (L // BLOCK))


def flops(attend) -> dict[str, float]:
    """Returns the FLOPs of each kernel of an attention and its gradient."""
    x = jax.ShapeDtypeStruct((B, H, L, K), jnp.float32)
    gradient = jax.grad(lambda q, k, v: jnp.sum(attend(q, k, v)), argnums=(0, 1, 2))
    with optax_promotion():
        return flops_by_kernel(jax.make_jaxpr(gradient)(x, x, x).jaxpr)


@pytest.mark.parametrize(("causal", "share"), [(True, UP_TO_DIAGONAL), (False, 1.0)])
def test_splash_attention_computes_blocks_up_to_the_diagonal(causal: bool, share: float) -> None:
    mask = (masks.CausalMask if causal else masks.FullMask)((L, L))
    names = ("q", "kv", "q_dkv", "kv_dkv", "q_dq", "kv_dq")
    sizes = splash.BlockSizes(**{f"block_{name}": BLOCK for name in names})
    attend = jax.vmap(
        splash.make_splash_mha_single_device(masks.MultiHeadMask([mask] * H), block_sizes=sizes)
    )
    counted = {name.split("_")[2]: count for name, count in flops(attend).items()}
    # Products with keys and values; the logits again, and products with two of three gradients.
    expected = {"fwd": 2, "dkv": 4, "dq": 3}
    assert counted == {name: share * n * WHOLE_PRODUCT for name, n in expected.items()}


@pytest.mark.parametrize("causal", [True, False])
def test_loops_of_a_kernel_run_from_bounds_that_depend_on_the_block(causal: bool) -> None:
    names = ("q", "k", "q_dkv", "kv_dkv", "q_dq", "kv_dq")
    triton = jax_kernels()
    sizes = triton.BlockSizes(**{f"block_{name}": BLOCK for name in names})

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q, k, v))
        return triton.mha(q, k, v, None, causal=causal, block_sizes=sizes)

    share = UP_TO_DIAGONAL if causal else 1.0
    counted = flops(attend)
    # Of two loops, one makes the gradients of keys and values, one that of queries.
    assert counted["mha_forward"] == share * 2 * WHOLE_PRODUCT
    assert counted["mha_backward"] == share * 7 * WHOLE_PRODUCT
