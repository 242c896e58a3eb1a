"""The FLOPs of attention kernels, counted by hand from their masks and blocks."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

from layouts.cost.dataflow import flops_by_kernel
from layouts.layout import Layout
from layouts.mesh import abstract_mesh
from models.attention.flash import Kernel, flash_attention
from models.attention.plain import Operands
from models.attention.triton import jax_kernels
from tests.toys import optax_promotion

B, H, L, K, BLOCK = 2, 3, 1024, 64, 256
WHOLE_PRODUCT = 2 * B * H * L * L * K
# Of L / BLOCK blocks in a row, those up to the diagonal.
UP_TO_DIAGONAL = (L // BLOCK + 1) / (2 * (L // BLOCK))


def flops(attend, length: int = L) -> dict[str, float]:
    """Returns the FLOPs of each kernel of an attention and its gradient."""
    x = jax.ShapeDtypeStruct((B, H, length, K), jnp.float32)
    gradient = jax.grad(lambda q, k, v: jnp.sum(attend(q, k, v)), argnums=(0, 1, 2))
    with optax_promotion():
        return flops_by_kernel(jax.make_jaxpr(gradient)(x, x, x).jaxpr)


BLOCKS_OF_A_ROW = L // BLOCK
# Of the first block of queries one, of each other one two blocks of keys.
OF_A_WINDOW = (2 * BLOCKS_OF_A_ROW - 1) / BLOCKS_OF_A_ROW**2


def splash_flops(mask: masks.Mask) -> dict[str, float]:
    names = ("q", "kv", "q_dkv", "kv_dkv", "q_dq", "kv_dq")
    sizes = splash.BlockSizes(**{f"block_{name}": BLOCK for name in names})
    kernel = splash.make_splash_mha_single_device(
        masks.MultiHeadMask([mask] * H), block_sizes=sizes
    )
    return {name.split("_")[2]: count for name, count in flops(jax.vmap(kernel)).items()}


@pytest.mark.parametrize(
    ("mask", "share"),
    [
        (masks.CausalMask((L, L)), UP_TO_DIAGONAL),
        (masks.FullMask((L, L)), 1.0),
        (masks.LocalMask((L, L), (BLOCK - 1, 0), 0), OF_A_WINDOW),
    ],
)
def test_splash_attention_computes_the_blocks_that_a_mask_has(
    mask: masks.Mask, share: float
) -> None:
    # Products with keys and values; the logits again, and products with two of three gradients.
    expected = {"fwd": 2, "dkv": 4, "dq": 3}
    assert splash_flops(mask) == {name: share * n * WHOLE_PRODUCT for name, n in expected.items()}


@pytest.mark.parametrize("window", [None, 1024])
def test_devices_that_share_a_row_share_its_blocks(window: int | None) -> None:
    length, size = 8192, 1024  # what the kernel takes as blocks
    rows, layout = length // size, Layout(mesh="x:2", rules="length:x")

    def attend(q_BJLK: jax.Array, k_BJMK: jax.Array, v_BJMK: jax.Array) -> jax.Array:
        q_BJQLK = layout.reshard(q_BJLK[:, :, None], "BJQLK")
        segments_BL = layout.reshard(jnp.zeros((B, length), jnp.int32), "BL")
        arrays = (Operands(q_BJQLK, k_BJMK, v_BJMK), segments_BL, segments_BL)
        return flash_attention(layout, Kernel("splash"), *arrays, causal=True, window=window)

    with jax.sharding.use_abstract_mesh(abstract_mesh({"x": 2})):
        counted = flops(attend, length)
    computed = rows * (rows + 1) / 2 if window is None else 2 * rows - 1
    product = 2 * B * H * K * size * size * computed / 2  # of two devices
    assert {name.split("_")[2]: count / product for name, count in counted.items()} == {
        "fwd": 2, "dkv": 4, "dq": 3,
    }  # fmt: skip


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
