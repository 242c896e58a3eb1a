"""Reads weights in MXFP4: 4-bit numbers, where each 32 share a power of two.

Rouhani et al. 2023 (OCP Microscaling Formats), section 5.
"""

import ml_dtypes
import numpy as np

from trainer.checkpoints.huggingface.families import Settings
from trainer.checkpoints.huggingface.weights import TensorInfo

BLOCKS, SCALES = "_blocks", "_scales"
"""Suffixes of the names of a weight's two tensors."""
VALUES = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
"""The value of each 4-bit number."""
BLOCK_BYTES = 16
BIAS = 127
"""The bias of the exponents."""


def without_method(settings: Settings) -> Settings:
    """Returns the settings without the MXFP4 quantization of the experts."""
    method = settings.get("quantization_config")
    if not isinstance(method, dict) or method.get("quant_method") != "mxfp4":
        return settings
    return {name: value for name, value in settings.items() if name != "quantization_config"}


def is_weight(blocks: TensorInfo, scales: TensorInfo) -> bool:
    """Returns whether two tensors are blocks and their scales."""
    are_bytes = {blocks.dtype, scales.dtype} == {"U8"}
    return are_bytes and len(scales.shape) == 3 and blocks.shape == (*scales.shape, BLOCK_BYTES)


def dequantized(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Returns the weight in bfloat16, which can represent all its numbers."""

    def expert(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
        values = VALUES[np.stack([blocks & 15, blocks >> 4], axis=-1)]
        values = values.reshape(*scales.shape, -1)
        scaled = np.ldexp(values, scales.astype(np.int32)[..., None] - BIAS)
        return scaled.reshape(len(scales), -1).T.astype(ml_dtypes.bfloat16)

    return np.stack([expert(*one) for one in zip(blocks, scales, strict=True)])
