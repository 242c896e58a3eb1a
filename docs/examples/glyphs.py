"""Draws characters in fonts: labeled images that need no download.

A run file imports this module and sets `ImageTask.source = @Glyphs()`.
"""

import functools
import hashlib
import importlib.metadata
import string
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from image_task import image_text

from configs.errors import extra_required
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
"""Faces of each split; no two splits share a face."""
SIZES = (5 / 12, 3 / 4)
"""Smallest and largest font size, as a fraction of the image's side."""
ANGLES = (-20, 20)
"""Smallest and largest rotation, in degrees."""


@spec
class Glyphs(Pairs):
    """Draws digits and capital letters in the fonts that come with matplotlib.

    The faces of the test split are in no other split.
    """

    side: Count = 24
    """Pixels along each side of an image."""
    count: Count = 24
    """Training images per character and face; the other splits have half as many."""

    def read(self, split: str, errors: str = "strict") -> Iterator[Pair]:
        """Yields images with their characters, always in the same order."""
        count = self.count if split == "train" else -(-self.count // 2)
        with extra_required("plot", "@Glyphs()"):
            for pixels_YX, character in drawn_images(split, self.side, count):
                yield Pair(image_text(pixels_YX[..., None]), character)

    def fingerprint(self) -> dict[str, Any]:
        """Returns what the images depend on: the versions of the packages, and this file."""
        rules = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:16]
        with extra_required("plot", "@Glyphs()"):
            versions = {name: importlib.metadata.version(name) for name in ("matplotlib", "numpy")}
        return {**versions, "rules": rules}


def drawn_images(split: str, side: int, count: int) -> Iterator[tuple[np.ndarray, str]]:
    """Yields `count` images of each character in each font of a split, with the character.

    Size, rotation and place are random, but the same in every call.
    """
    rng = np.random.Generator(np.random.PCG64([*split.encode(), side, count]))
    for face in FONTS[split]:
        for character in CHARACTERS:
            for _ in range(count):
                yield image(face, character, side, rng), character


def image(face: str, character: str, side: int, rng: np.random.Generator) -> np.ndarray:
    """Draws a character somewhere in a square, white on black."""
    from matplotlib.ft2font import LoadFlags  # importing matplotlib takes a second

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
