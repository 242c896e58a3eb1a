"""Writes images as text, and defines sources of pairs of an image and its label."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from configs.errors import UserError, brief, extra_required
from configs.spec import Count, spec
from data.corpora import glyphs
from data.sources.pairs import Pair, Pairs
from data.sources.text import SPLITS

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
        pixels_YXZ = values[3:].reshape(height, width, FORMATS[name])
    except (ValueError, KeyError, OverflowError):
        raise UserError(
            f"image {brief(text, 60)!r}: is not an image.  Legal: plain PGM or PPM, such as "
            '"P2 2 1 255 0 128": P2 (grey) or P3 (RGB), width, height, 255 and a number a pixel '
            "and colour."
        ) from None
    if largest != 255 or np.any((pixels_YXZ < 0) | (pixels_YXZ > 255)):
        raise UserError(f"image {brief(text, 60)!r}: legal are numbers from 0 to 255, and 255.")
    return pixels_YXZ.astype(np.uint8)


@spec
class Glyphs(Pairs):
    """Draws digits and capital letters in the fonts that come with matplotlib.

    The faces of the test split are in no other split.
    """

    side: Count = 24
    """Pixels along each side of an image."""
    count: Count = 24
    """Training images of each character in each face; the other splits have half as many."""

    def splits(self) -> tuple[str, ...]:
        return SPLITS

    def read(self, split: str, errors: str = "strict") -> Iterator[Pair]:
        """Yields images with their characters, always in the same order."""
        count = self.count if split == "train" else -(-self.count // 2)
        with extra_required("plot", "@Glyphs()"):
            for pixels_YX, character in glyphs.images(split, self.side, count):
                yield Pair(image_text(pixels_YX[..., None]), character)

    def fingerprint(self) -> dict[str, Any]:
        with extra_required("plot", "@Glyphs()"):
            return glyphs.versions()
