"""Defines a task of images and labels: an example of your own task, which a run file imports."""

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import numpy as np

from configs.errors import UserError, brief
from configs.spec import Count, spec
from data.packing.pack import Packed
from data.packing.rows import Counts, Rows, hashed_pair, read_rows
from data.sources.pairs import Pair, Pairs
from data.sources.text_files import without_carriage_return
from data.task import Digest, PackChunk, PartOfText, Task, hashed
from data.tokenizers.labels import Labels
from data.vocab import Vocab
from data.vocabs import Vocabs

Shape = tuple[int, int, int]
FORMATS = {"P2": 1, "P3": 3}
"""Numbers per pixel, by the first word of a plain PGM or PPM."""


@dataclasses.dataclass(frozen=True, eq=False)
class ImageRows(Rows):
    """Holds the images and labels of one split."""

    shape: Shape = (0, 0, 0)

    def batch(self, row_ids: np.ndarray) -> dict[str, np.ndarray]:
        """Returns rows as int32 arrays; NO_ROW becomes an image of zeros without a target."""
        images, targets_BL, segments_BL = read_rows(
            row_ids, self.arrays["images"], self.targets_BL, self.segments_BL
        )
        return {
            "images_BYXZ": images.reshape(-1, *self.shape).astype(np.int32),
            "targets_BL": targets_BL.astype(np.int32),
            "segments_BL": segments_BL.astype(np.int32),
        }


@spec
class ImageTask(Task):
    """Defines a task of pairs: an image, written as plain PGM or PPM, and its label."""

    source: Pairs
    """Source of the pairs, such as files of pairs."""
    vocab: Labels = Labels()
    """The labels of the training split."""
    length: Literal[1] = 1
    """A row has one target, the label."""
    packs: Literal[False] = False
    """A row has one image."""
    height: Count
    """Rows of pixels of each image."""
    width: Count
    """Columns of pixels of each image."""
    channels: Literal[1, 3] = 1
    """Numbers per pixel: 1 for grey, 3 for RGB."""
    word_list: None = None
    """Labels have no words to replace."""

    takes_pairs = True
    unit = "images"
    rows_kind = ImageRows

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.source.tags:
            raise UserError(
                f"ImageTask.source: its tags ({', '.join(self.source.tags)}) are for encoders of "
                "text.  Unset them."
            )
        for part in self.source.parts_of("train").values():
            if part.holds_out:  # by targets
                raise UserError(
                    f"ImageTask.source: @{type(part).__name__}() has no files of validation, and "
                    "would hold out all images of some labels.  Give it such files."
                )

    @property
    def image_shape(self) -> Shape:
        return self.height, self.width, self.channels

    @property
    def array_lengths(self) -> dict[str, int]:
        return {"targets_BL": 1, "segments_BL": 1}

    @property
    def array_shapes(self) -> dict[str, tuple[int, ...]]:
        return {"images_BYXZ": self.image_shape, **super().array_shapes}

    def vocab_text(self, name: str) -> Iterator[str]:
        """Yields the labels of the training split."""
        for part in self.source.parts_of("train").values():
            yield from (label for _, label in part.untagged("train"))

    def prompt(self, line: str) -> str:
        raise UserError(
            f"task {self.name}: its model labels images and cannot continue text.  Legal: "
            "meshloom evaluate and meshloom score."
        )

    def rows_of_text(self, lines: Iterable[str], vocabs: Vocabs) -> Rows:
        """Reads lines of an image, a tab and its label, for the loss of the labels."""
        return self.pack_lines(list(map(without_carriage_return, lines)), vocabs, None)[0]

    def columns(self, vocabs: Vocabs) -> dict[str, tuple[int, type]]:
        pixels = self.height * self.width * self.channels
        return {**super().columns(vocabs), "images": (pixels, np.uint8)}

    def part_of_text(self, name: str, part: Pairs, split: str, digest: Digest) -> PartOfText:
        pairs = hashed(part.untagged(split), digest, hashed_pair)  # images as text
        return PartOfText(name, pairs, Counter())

    def chunk_packer(self, vocabs: Vocabs) -> PackChunk:
        return lambda pairs, tag, training: packed_images(pairs, vocabs.target, self.image_shape)

    def row_settings(self, vocabs: Vocabs) -> dict[str, Any]:
        return {"shape": self.image_shape}

    def summary(self, counts: Counts) -> str:
        return f"{counts.rows:,} images of {self.height} x {self.width}"


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


def image_text(pixels_YXZ: np.ndarray) -> str:
    """Writes an image of bytes as plain PGM or PPM, in one line.

    >>> image_text(np.array([[[0], [255]]], np.uint8))
    'P2 2 1 255 0 255'
    """
    height, width, channels = pixels_YXZ.shape
    name = next(name for name, numbers in FORMATS.items() if numbers == channels)
    return " ".join(map(str, (name, width, height, 255, *pixels_YXZ.ravel().tolist())))


def image_of(text: str) -> np.ndarray:
    """Reads an image from plain PGM or PPM, with numbers separated by white space."""
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
