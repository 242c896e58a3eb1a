"""Holds images and their labels: each is a row, whose only target is the label."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from configs.errors import UserError
from data.packing.pack import Packed
from data.packing.rows import Counts, Rows, read_rows
from data.sources.images import image_of
from data.sources.pairs import Pair
from data.vocab import Vocab

Shape = tuple[int, int, int]


@dataclasses.dataclass(frozen=True, eq=False)
class ImageRows(Rows):
    """Holds the images and labels of one split."""

    shape: Shape = (0, 0, 0)

    def batch(self, row_ids: np.ndarray) -> dict[str, np.ndarray]:
        """Returns rows as int32 arrays; NO_ROW gives an image of zeros without a target."""
        images, targets_BL, segments_BL = read_rows(
            row_ids, self.arrays["images"], self.targets_BL, self.segments_BL
        )
        return {
            "images_BYXZ": images.reshape(-1, *self.shape).astype(np.int32),
            "targets_BL": targets_BL.astype(np.int32),
            "segments_BL": segments_BL.astype(np.int32),
        }


def packed_images(pairs: Sequence[Pair], vocab: Vocab, shape: Shape) -> tuple[Packed, Counts]:
    """Reads images, each with its label, into rows."""
    images = np.zeros((len(pairs), *shape), np.uint8)
    for number, pair in enumerate(pairs):
        pixels = image_of(pair.source)
        if pixels.shape != shape:
            raise UserError(
                f"image with the label {pair.target!r}: found {described(pixels.shape)}.  Legal: "
                f"{described(shape)}, as the settings of the ImageTask say."
            )
        images[number] = pixels
    labels = vocab.encode([pair.target for pair in pairs])
    arrays = {
        "images": images.reshape(len(pairs), math.prod(shape)),
        "targets": np.array(labels, vocab.dtype).reshape(-1, 1),
        "segments": np.ones((len(pairs), 1), np.uint16),
    }
    numbers = np.arange(len(pairs))
    pieces = np.stack([numbers, numbers, np.ones_like(numbers)], axis=1)
    return Packed(arrays, pieces), Counts(lines=len(pairs), tokens=len(pairs), rows=len(pairs))


def described(shape: Sequence[int]) -> str:
    """Names the sizes of an image.

    >>> described((24, 20, 1))
    'height 24, width 20, channels 1'
    """
    names = ("height", "width", "channels")
    return ", ".join(f"{name} {size}" for name, size in zip(names, shape, strict=True))
