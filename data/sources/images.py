"""Writes images as text, and reads them."""

import numpy as np

from configs.errors import UserError, brief

FORMATS = {"P2": 1, "P3": 3}
"""Numbers of a pixel, by the word with which a plain PGM or PPM begins."""


def image_text(pixels_YXZ: np.ndarray) -> str:
    """Writes an image of bytes as plain PGM or PPM, in one line.

    >>> image_text(np.array([[[0], [255]]], np.uint8))
    'P2 2 1 255 0 255'
    """
    height, width, channels = pixels_YXZ.shape
    name = next(name for name, numbers in FORMATS.items() if numbers == channels)
    return " ".join(map(str, (name, width, height, 255, *pixels_YXZ.ravel().tolist())))


def image_of(text: str) -> np.ndarray:
    """Reads an image from plain PGM or PPM, whose numbers white space separates."""
    try:
        name, *numbers = text.split()
        values = np.array(numbers, np.int64)
        width, height, largest, *_ = values
        pixels_YXZ = values[3:].reshape(max(height, 0), max(width, 0), FORMATS[name])
    except (ValueError, KeyError, OverflowError):
        raise UserError(
            f"image {brief(text, 60)!r}: is not an image.  Legal: plain PGM or PPM, such as "
            '"P2 2 1 255 0 128": P2 (grey) or P3 (RGB), width, height, 255 and a number a pixel '
            "and colour."
        ) from None
    if largest != 255 or np.any((pixels_YXZ < 0) | (pixels_YXZ > 255)):
        raise UserError(f"image {brief(text, 60)!r}: legal are numbers from 0 to 255, and 255.")
    return pixels_YXZ.astype(np.uint8)
