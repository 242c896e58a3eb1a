"""Computes attention on NVIDIA GPUs with JAX's Triton kernel, which stores no logits in memory.

cuDNN's attention (`jax.nn.dot_product_attention`) accepts segments only as a mask of all queries
and keys, which is stored in memory.
"""

import importlib
import importlib.util
import warnings
from types import ModuleType

import jax
import jax.numpy as jnp
from jax import Array

MODULE = "jax.experimental.pallas.ops.gpu.attention"


MIN_BLOCK, MAX_BLOCK = 16, 128
"""Queries or keys: the least that Triton multiplies, and what lengths must be multiples of."""
BACKWARD_BLOCK = 32
"""JAX's default in the kernels of the gradients."""
BLOCK_BYTES = 16 * 1024
"""Size of a block of one head; five blocks fit into the shared memory of all GPUs since Ampere."""


def triton_attention(
    q_BJQLK: Array,
    k_BJMK: Array,
    v_BJMK: Array,
    segments_BL: Array,
    segments_BM: Array,
    *,
    causal: bool,
    interpret: bool,
) -> Array:
    """Computes self-attention within the segments of rows, on one device."""
    rows, kv_heads, queries, length, width = q_BJQLK.shape
    heads = kv_heads * queries

    def repeated(x_BJMK: Array) -> Array:
        """Repeats keys (or values) for each query head, and puts heads after positions."""
        x_BJQMK = jnp.broadcast_to(x_BJMK[:, :, None], (rows, kv_heads, queries, *x_BJMK.shape[2:]))
        return jnp.swapaxes(x_BJQMK.reshape(rows, heads, -1, width), 1, 2)

    q_BLHK = jnp.swapaxes(q_BJQLK.reshape(rows, heads, length, width), 1, 2)
    kernels = jax_kernels()
    k_BMHK, v_BMHK = repeated(k_BJMK), repeated(v_BJMK)
    sizes = kernels.BlockSizes(**block_sizes(width * q_BJQLK.dtype.itemsize))
    y_BLHK = kernels.mha(
        q_BLHK, k_BMHK, v_BMHK, segments_BL, causal=causal, block_sizes=sizes, interpret=interpret
    )
    return jnp.swapaxes(y_BLHK, 1, 2).reshape(q_BJQLK.shape)


def missing_triton() -> str | None:
    """Returns why JAX's kernels cannot be used, or None.  Since JAX 0.12 they are deprecated."""
    try:
        spec = importlib.util.find_spec(MODULE)
    except ModuleNotFoundError:  # a parent package is gone too
        spec = None
    return f"jax {jax.__version__} has no {MODULE}" if spec is None else None


def jax_kernels() -> ModuleType:
    """Imports JAX's kernels only when they are needed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return importlib.import_module(MODULE)


def block_sizes(token_bytes: int) -> dict[str, int]:
    """Returns the sizes of blocks, given the bytes of one token in one head."""
    fitting = BLOCK_BYTES // token_bytes
    block = max(MIN_BLOCK, min(MAX_BLOCK, 1 << (fitting.bit_length() - 1)))
    backward = min(block, BACKWARD_BLOCK)
    names = ("block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq")
    return {"block_q": block, "block_k": block, **dict.fromkeys(names, backward)}
