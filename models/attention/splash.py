"""Computes attention on TPUs with JAX's splash attention, which stores no logits in memory.

If a layout splits the length, each device has some queries, and gathers all keys and values for
them (context parallelism; Llama Team 2024, section 3.3.2).  Queries of causal attention are dealt
so that each of n devices computes the same number of blocks: device i keeps the first half of its
queries, and swaps the second half with device n - 1 - i.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

from layouts.einsum import mesh_device
from layouts.shards import Entry, mesh_axes, num_shards, ppermute, shard_index

BLOCKS = (1024, 512, 256, 128)
"""Sizes of blocks of queries and keys, the best first; the largest that divides is used.  The
smallest is the width of a TPU's vector registers."""
MAX_BLOCK_BYTES = 512 * 1024
"""Bytes of one head's block up to which a kernel's blocks fit into fast memory (16 MiB on v4)."""
MAX_COMPUTED_KEYS = 512
"""Keys whose logits are in fast memory at the same time."""
V5P_COMPUTED_KEYS, LONG_ROW, LONG_BLOCK = 256, 8192, 2048
"""The fastest choices in most measurements of the forward pass in tokamax 0.0.17: on v5p fewer keys
at a time; on v6e and tpu7x, for rows of at least this length, larger blocks.  None was measured
with a window, for which larger blocks would compute more masked logits."""
MAX_PARTIAL_SUMS = 4
"""Most blocks of keys for which one kernel computes all gradients.  It writes the queries' gradient
once for each block of keys; two kernels compute the logits twice, but write that gradient once."""


class SeesKeys(NamedTuple):
    """Computes whether queries see keys, from their positions."""

    window: int | None

    def __call__(self, query: jax.Array, key: jax.Array) -> jax.Array:
        if self.window is None:
            return query >= key
        return (query >= key) & (query - self.window < key)


class CausalMask(masks.Mask):
    """Lets queries see the keys up to their own position, or the last of these with a window.

    JAX's masks require queries in order.  They also compute each block in numpy to find out whether
    it is masked, which takes minutes for 131,072 tokens.  Here the ends of a block suffice.
    """

    def __init__(self, q_sequence: np.ndarray, keys: int, window: int | None):
        self.q_sequence = q_sequence
        """Positions of the queries; they follow one another inside each block."""
        self.mask_function = SeesKeys(window)
        self._keys = keys

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.q_sequence), self._keys

    def __getitem__(self, blocks: tuple[slice, slice]) -> np.ndarray:
        """Returns whether any key of a block is seen, and whether all are, as an array."""
        queries, keys = blocks
        first, last = self.q_sequence[queries][[0, -1]]
        nearest, farthest = first - (keys.stop - 1), last - keys.start
        window = self.shape[1] if self.mask_function.window is None else self.mask_function.window
        sees_any = farthest >= 0 and nearest < window
        return np.array([[sees_any, nearest >= 0 and farthest < window]])


def splash_attention(
    q_BJQLK: Array,
    k_BJMK: Array,
    v_BJMK: Array,
    segments_BL: Array,
    segments_BM: Array,
    sink_JQ: Array | None = None,
    *,
    causal: bool,
    window: int | None,
    logit_cap: float | None,
    entry: Entry,
    interpret: bool,
) -> Array:
    """Attends within segments with a device's queries; `entry` holds what splits the length.

    Values may be narrower than queries and keys.
    """
    if axes := mesh_axes(entry):
        k_BJMK, v_BJMK = (jax.lax.all_gather(x, axes, axis=2, tiled=True) for x in (k_BJMK, v_BJMK))
        segments_BM = jax.lax.all_gather(segments_BM, axes, axis=1, tiled=True)
    rows, kv_heads, queries, length, width = q_BJQLK.shape
    memory, shards = k_BJMK.shape[2], num_shards(entry) if causal else 1
    q_BHLK = q_BJQLK.reshape(rows, kv_heads * queries, length, width)
    # With a short window, all queries see equally many keys, so no exchange is needed.
    is_dealt = shards > 1 and length % (2 * BLOCKS[-1]) == 0 and length < (window or memory)
    chunk = length // 2 if is_dealt else length
    if is_dealt:
        q_BHLK, segments_BL = deal(q_BHLK, entry, 2), deal(segments_BL, entry, 1)
    if causal:
        positions = positions_of_shards(shards, length, is_dealt=is_dealt)
        mask: masks.Mask = CausalMask(positions, memory, window)
    else:
        mask = masks.FullMask((length, memory))
    kernel = kernels.make_splash_mha(
        masks.MultiHeadMask([mask] * (kv_heads * queries)),
        block_sizes=block_sizes(chunk, memory, width * q_BJQLK.dtype.itemsize, window),
        attn_logits_soft_cap=logit_cap,
        residual_checkpoint_name="context",
        head_shards=1,
        q_seq_shards=shards,
        interpret=interpret,
    )

    def part_of_shard(x: Array) -> Array:
        """Returns a device's part of the positions, or of the arrays that select its blocks."""
        axis = 0 if x.ndim == 1 else 1
        size, index = x.shape[axis] // shards, shard_index(axes)
        return jax.lax.dynamic_slice_in_dim(x, index * size, size, axis)

    if shards > 1:
        kernel = jax.tree.map(part_of_shard, kernel)
    sink_H = None if sink_JQ is None else sink_JQ.reshape(-1)
    segments = kernels.SegmentIds(segments_BL, segments_BM)
    attend = jax.vmap(kernel, in_axes=(0, 0, 0, 0, None))
    y_BHLK = attend(q_BHLK, k_BJMK, v_BJMK, segments, sink_H)
    if is_dealt:
        y_BHLK = deal(y_BHLK, entry, 2)
    return y_BHLK.reshape(*q_BJQLK.shape[:-1], -1)


def deal(x: Array, entry: Entry, axis: int) -> Array:
    """Swaps the second half of device i's shard along an axis with that of device n - 1 - i.

    A second call swaps them back.
    """
    count = num_shards(entry)
    kept, sent = jnp.split(x, 2, axis)
    received = ppermute(sent, entry, [(index, count - 1 - index) for index in range(count)])
    return jnp.concatenate([kept, received], axis)


def positions_of_shards(shards: int, length: int, *, is_dealt: bool) -> np.ndarray:
    """Returns the positions of all devices' queries, device by device."""
    chunks = np.arange(shards * length, dtype=np.int32).reshape(shards, 2, -1)
    if is_dealt:
        chunks[:, 1] = chunks[::-1, 1].copy()
    return chunks.ravel()


def block_sizes(
    length: int, memory: int, token_bytes: int, window: int | None
) -> kernels.BlockSizes:
    """Returns the sizes of blocks for these numbers of queries and keys."""
    device = mesh_device()
    kind = "" if device is None else device.device_kind
    is_long = window is None and memory >= LONG_ROW and kind.startswith(("TPU v6", "TPU7"))
    sizes = (LONG_BLOCK, *BLOCKS) if is_long else BLOCKS
    fitting = [size for size in sizes if size * token_bytes <= MAX_BLOCK_BYTES] or BLOCKS[-1:]
    block_q = next(size for size in fitting if length % size == 0)
    block_kv = next(size for size in fitting if memory % size == 0)
    compute = min(block_kv, MAX_COMPUTED_KEYS)
    fused = memory // block_kv <= MAX_PARTIAL_SUMS
    return kernels.BlockSizes(
        block_q=block_q,
        block_kv=block_kv,
        block_kv_compute=min(compute, V5P_COMPUTED_KEYS) if kind == "TPU v5" else compute,
        block_q_dkv=block_q,
        block_kv_dkv=block_kv,
        block_kv_dkv_compute=compute,
        block_q_dq=None if fused else block_q,
        block_kv_dq=None if fused else block_kv,
        use_fused_bwd_kernel=fused,
    )
