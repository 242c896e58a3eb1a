"""Computes attention on TPUs by JAX's splash attention, which keeps no logits in memory."""

from typing import TYPE_CHECKING

import jax

if TYPE_CHECKING:
    from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_kernel import BlockSizes

Array = jax.Array

BLOCKS = (1024, 512, 256, 128)
"""Sizes of blocks of queries and of keys, the best first; the largest that divides is taken.  The
smallest is the width of a TPU's vector registers."""
MAX_BLOCK_BYTES = 512 * 1024
"""Of a block of one head, so that all of a kernel's blocks are in fast memory together (16 MiB on
v4)."""
MAX_COMPUTED_KEYS = 512
"""Keys whose logits are in fast memory at a time."""
MAX_PARTIAL_SUMS = 4
"""Blocks of keys up to which one kernel computes all gradients.  It writes the queries' gradient
once for each block of keys; two kernels compute the logits twice, and write it once."""


def splash_attention(
    q_BJQLK: Array,
    k_BJMK: Array,
    v_BJMK: Array,
    segments_BL: Array,
    segments_BM: Array,
    *,
    causal: bool,
    interpret: bool,
) -> Array:
    """Attends within segments, on one device."""
    # Imported here, because most runs on CPUs never need it.
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    rows, kv_heads, queries, length, width = q_BJQLK.shape
    shape = (length, k_BJMK.shape[2])
    mask = masks.CausalMask(shape) if causal else masks.FullMask(shape)
    kernel = kernels.make_splash_mha_single_device(
        masks.MultiHeadMask([mask] * (kv_heads * queries)),
        block_sizes=block_sizes(*shape, width * q_BJQLK.dtype.itemsize),
        interpret=interpret,
    )
    q_BHLK = q_BJQLK.reshape(rows, kv_heads * queries, length, width)
    segments = kernels.SegmentIds(q=segments_BL, kv=segments_BM)
    y_BHLK = jax.vmap(kernel)(q_BHLK, k_BJMK, v_BJMK, segments)
    return y_BHLK.reshape(q_BJQLK.shape)


def block_sizes(length: int, memory: int, token_bytes: int) -> "BlockSizes":
    """Returns the sizes of blocks for so many queries and keys, each of so many bytes."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels

    fitting = [size for size in BLOCKS if size * token_bytes <= MAX_BLOCK_BYTES] or BLOCKS[-1:]
    block_q, block_kv = (
        next(size for size in fitting if count % size == 0) for count in (length, memory)
    )
    compute = min(block_kv, MAX_COMPUTED_KEYS)
    fused = memory // block_kv <= MAX_PARTIAL_SUMS
    return kernels.BlockSizes(
        block_q=block_q,
        block_kv=block_kv,
        block_kv_compute=compute,
        block_q_dkv=block_q,
        block_kv_dkv=block_kv,
        block_kv_dkv_compute=compute,
        block_q_dq=None if fused else block_q,
        block_kv_dq=None if fused else block_kv,
        use_fused_bwd_kernel=fused,
    )
