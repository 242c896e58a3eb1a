"""Writes images as text, and draws characters in fonts as a source of images and labels."""

import functools
import hashlib
import importlib.metadata
import string
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from configs.errors import UserError, brief, extra_required
from configs.spec import Count, spec
from data.sources.pairs import Pair, Pairs

if TYPE_CHECKING:
    from matplotlib.ft2font import FT2Font

CHARACTERS = string.digits + string.ascii_uppercase
FONTS = {
    "train": (
        "DejaVuSans", "DejaVuSans-Bold", "DejaVuSans-Oblique", "DejaVuSansMono",
        "DejaVuSansMono-Bold", "DejaVuSansMono-BoldOblique", "DejaVuSerif", "DejaVuSerif-Bold",
        "DejaVuSerif-BoldItalic", "STIXGeneral", "STIXGeneralBol", "STIXGeneralBolIta", "cmr10",
        "cmss10", "cmti10",
    ),
    "validation": ("DejaVuSansMono-Oblique", "STIXGeneralItalic", "cmb10"),
    "test": ("DejaVuSans-BoldOblique", "DejaVuSerif-Italic", "cmtt10"),
}  # fmt: skip
"""Faces of each split: no split has a face of another."""
SIZES = (5 / 12, 3 / 4)
"""Least and largest size of a font, as a share of the side of an image."""
ANGLES = (-20, 20)
"""Least and largest rotation, in degrees."""
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

    def read(self, split: str, errors: str = "strict") -> Iterator[Pair]:
        """Yields images with their characters, always in the same order."""
        count = self.count if split == "train" else -(-self.count // 2)
        with extra_required("plot", "@Glyphs()"):
            for pixels_YX, character in drawn_images(split, self.side, count):
                yield Pair(image_text(pixels_YX[..., None]), character)

    def fingerprint(self) -> dict[str, Any]:
        """Names what the images depend on: the versions of the packages, and this file."""
        rules = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:16]
        with extra_required("plot", "@Glyphs()"):
            versions = {name: importlib.metadata.version(name) for name in ("matplotlib", "numpy")}
        return {**versions, "rules": rules}


def drawn_images(split: str, side: int, count: int) -> Iterator[tuple[np.ndarray, str]]:
    """Yields `count` images of each character in each font of a split, with the character.

    Size, rotation and place are random, and the same in every call.
    """
    rng = np.random.Generator(np.random.PCG64([*split.encode(), side, count]))
    for face in FONTS[split]:
        for character in CHARACTERS:
            for _ in range(count):
                yield image(face, character, side, rng), character


def image(face: str, character: str, side: int, rng: np.random.Generator) -> np.ndarray:
    """Draws a character somewhere in a square, white on black."""
    from matplotlib.ft2font import LoadFlags  # matplotlib takes a second

    font = _font(face)
    font.set_size(side * rng.uniform(*SIZES), 72)
    font.set_text(character, rng.uniform(*ANGLES), flags=LoadFlags.NO_HINTING)
    font.draw_glyphs_to_bitmap(antialiased=True)
    drawn = np.asarray(font.get_image())[:side, :side]
    pixels = np.zeros((side, side), np.uint8)
    top, left = (rng.integers(side - size + 1) for size in drawn.shape)
    pixels[top : top + drawn.shape[0], left : left + drawn.shape[1]] = drawn
    return pixels


@functools.cache
def _font(face: str) -> "FT2Font":
    import matplotlib
    from matplotlib.ft2font import FT2Font

    return FT2Font(str(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / f"{face}.ttf"))
