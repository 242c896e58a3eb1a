"""Tells splash attention which keys queries see, at any positions, in rows of any length."""

from typing import NamedTuple

import jax
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks


class SeesKeys(NamedTuple):
    """Computes whether queries see keys, by their positions."""

    window: int | None

    def __call__(self, query: jax.Array, key: jax.Array) -> jax.Array:
        if self.window is None:
            return query >= key
        return (query >= key) & (query - self.window < key)


class CausalMask(masks.Mask):
    """Lets queries see the keys up to their own position, or the last of them, a window.

    JAX's masks have each query in its place, and compute a whole block in numpy to know whether it
    is masked: minutes for 131,072 tokens.  Here the ends of a block tell.
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
        """Returns two numbers for a block: whether any key is seen, and whether all are."""
        queries, keys = blocks
        first, last = self.q_sequence[queries][[0, -1]]
        nearest, farthest = first - (keys.stop - 1), last - keys.start
        window = self.shape[1] if self.mask_function.window is None else self.mask_function.window
        sees_any = farthest >= 0 and nearest < window
        return np.array([[sees_any, nearest >= 0 and farthest < window]])
