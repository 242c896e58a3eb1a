"""The FLOPs of attention kernels, counted by hand from their masks and blocks."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

from layouts.cost.dataflow import KernelWork, work_by_kernel
from layouts.cost.hardware import CHIPS
from layouts.cost.jaxpr_cost import OpCost
from layouts.cost.step_time import op_seconds
from layouts.layout import Layout
from layouts.mesh import abstract_mesh
from models.attention.flash import Kernel, flash_attention
from models.attention.plain import Operands
from models.attention.splash import splash_attention
from models.attention.triton import jax_kernels
from tests.toys import absent_mesh, optax_promotion

B, H, L, K, BLOCK = 2, 3, 1024, 64, 256
WHOLE_PRODUCT = 2 * B * H * L * L * K
# Of L / BLOCK blocks in a row, those up to the diagonal.
UP_TO_DIAGONAL = (L // BLOCK + 1) / (2 * (L // BLOCK))


def work(attend, length: int = L) -> dict[str, KernelWork]:
    """Returns the work of each kernel of an attention and its gradient."""
    x = jax.ShapeDtypeStruct((B, H, length, K), jnp.float32)
    gradient = jax.grad(lambda q, k, v: jnp.sum(attend(q, k, v)), argnums=(0, 1, 2))
    with optax_promotion():
        return work_by_kernel(jax.make_jaxpr(gradient)(x, x, x).jaxpr)


def flops(attend, length: int = L) -> dict[str, float]:
    return {name: kernel.flops for name, kernel in work(attend, length).items()}


BLOCKS_OF_A_ROW = L // BLOCK
# Of the first block of queries one, of each other one two blocks of keys.
OF_A_WINDOW = (2 * BLOCKS_OF_A_ROW - 1) / BLOCKS_OF_A_ROW**2


def splash_work(mask: masks.Mask) -> dict[str, KernelWork]:
    names = ("q", "kv", "q_dkv", "kv_dkv", "q_dq", "kv_dq")
    sizes = splash.BlockSizes(**{f"block_{name}": BLOCK for name in names})
    kernel = splash.make_splash_mha_single_device(
        masks.MultiHeadMask([mask] * H), block_sizes=sizes
    )
    return {name.split("_")[2]: count for name, count in work(jax.vmap(kernel)).items()}


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
    counted = {name: kernel.flops for name, kernel in splash_work(mask).items()}
    assert counted == {name: share * n * WHOLE_PRODUCT for name, n in expected.items()}


def test_matrix_units_pad_heads_and_logits_take_exponentials() -> None:
    logits = UP_TO_DIAGONAL * B * H * L * L
    for name, kernel in splash_work(masks.CausalMask((L, L))).items():
        # Heads have K = 64 columns.
        assert kernel.flops_128 == pytest.approx(2 * kernel.flops)
        assert kernel.flops_256 == pytest.approx(4 * kernel.flops)
        # For each block of keys, the forward pass scales 128 copies of its sums.
        of_sums = 128 / BLOCK if name == "fwd" else 0
        assert kernel.exponentials == pytest.approx((1 + of_sums) * logits)


# Milliseconds of causal attention of 16,384 tokens, forward, in bfloat16, with statistics for the
# backward pass: heads and their width.  The tables of kernels that tokamax 0.0.17 contains
# (data/autotuning/tpu_v5, tpu_v6_lite, tpu7x/pallas_mosaic_tpu_flash_attention.json).
MEASURED_MS = {
    (32, 64): {"v5p": 6.730, "v6e": 8.051, "tpu7x": 7.414},
    (16, 128): {"v5p": 3.485, "v6e": 4.304, "tpu7x": 3.809},
    (8, 256): {"v5p": 3.199, "v6e": 2.503, "tpu7x": 2.175},
}


@pytest.mark.parametrize("chip", ["v5p", "v6e", "tpu7x"])
@pytest.mark.parametrize(("heads", "width"), MEASURED_MS)
def test_the_time_of_a_kernel_is_near_what_was_measured(heads: int, width: int, chip: str) -> None:
    x_BHLK = jax.ShapeDtypeStruct((1, heads, 1, 16384, width), jnp.bfloat16)
    x_BHMK = jax.ShapeDtypeStruct((1, heads, 16384, width), jnp.bfloat16)
    segments_BL = jax.ShapeDtypeStruct((1, 16384), jnp.int32)
    settings = {"causal": True, "window": None, "logit_cap": None}
    attend = functools.partial(splash_attention, **settings, entry=None, interpret=False)
    with jax.sharding.use_abstract_mesh(absent_mesh(CHIPS[chip].kind, "tpu", x=1)):
        traced = jax.make_jaxpr(attend)(x_BHLK, x_BHMK, x_BHMK, segments_BL, segments_BL)
    (kernel,) = work_by_kernel(traced.jaxpr).values()
    planned_ms = 1e3 * op_seconds(CHIPS[chip], OpCost(0, 0, 0, 1).with_kernel(kernel))
    assert 0.8 < planned_ms / MEASURED_MS[heads, width][chip] < 1.08


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
