"""Numbers of four bits that share an exponent."""

import numpy as np

from trainer.checkpoints.huggingface.mxfp4 import dequantized


def test_two_numbers_in_a_byte_share_a_scale() -> None:
    blocks, scales = np.full((1, 1, 1, 16), 0x9F, np.uint8), np.full((1, 1, 1), 128, np.uint8)
    assert dequantized(blocks, scales)[0, :3, 0].tolist() == [-12.0, -1.0, -12.0]
