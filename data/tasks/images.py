"""Defines tasks of images and labels, of which a model learns the labels."""

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from configs.errors import UserError
from configs.spec import Count, spec
from data.packing.image_rows import ImageRows, Shape, packed_images
from data.packing.rows import Counts, RowArray, Rows
from data.sources.pairs import Pairs
from data.sources.text_files import without_carriage_return
from data.task import PackChunk, PartOfText, Task, hashed_parts
from data.tasks.pairs import hashed_pairs, pack_pair_lines
from data.tokenizers.labels import Labels
from data.vocabs import Vocabs


@spec
class ImageTask(Task):
    """Defines a task of pairs of an image, written as plain PGM or PPM, and its label."""

    source: Pairs
    """Where the pairs come from: files of pairs, or @Glyphs()."""
    vocab: Labels = Labels()
    """The labels are those of the training split."""
    length: Literal[1] = 1
    """A row has one target, the label."""
    packs: Literal[False] = False
    """A row has one image."""
    height: Count
    """Rows of pixels of each image."""
    width: Count
    """Columns of pixels of each image."""
    channels: Literal[1, 3] = 1
    """Numbers of a pixel: 1 is grey, 3 is RGB."""
    word_list: None = None
    """A label is no text."""

    takes_pairs = True
    unit = "images"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.source.tags:
            raise UserError(
                f"ImageTask.source: its tags ({', '.join(self.source.tags)}) are for encoders of "
                "text.  Unset them."
            )
        for part in self.source.parts_of("train").values():
            if part.holds_out_targets:
                raise UserError(
                    f"ImageTask.source: @{type(part).__name__}() has no files of validation, and "
                    "would hold out all images of some labels.  Give it such files."
                )

    @property
    def image_shape(self) -> Shape:
        return self.height, self.width, self.channels

    @property
    def array_lengths(self) -> dict[str, int]:
        """Names the arrays of a batch, each with its length in a row."""
        return {"targets_BL": 1, "segments_BL": 1}

    @property
    def array_shapes(self) -> dict[str, tuple[int, ...]]:
        """Names the arrays of a batch, each with the shape that it has in a row."""
        return {"images_BYXZ": self.image_shape, **super().array_shapes}

    def vocab_text(self, name: str) -> Iterator[str]:
        """Yields the labels of the training split."""
        for part in self.source.parts_of("train").values():
            yield from (label for _, label in part.untagged("train"))

    def prompt(self, line: str) -> str:
        raise UserError(
            f"task {self.name}: its model labels images and continues no text.  Legal: "
            "meshloom evaluate and meshloom score."
        )

    # Rows

    def pack_lines(
        self, lines: Sequence[str], vocabs: Vocabs, tag: str | None
    ) -> tuple[Rows, Sequence[str]]:
        """Reads lines, each an image, a tab and its label, which a model predicts."""
        return pack_pair_lines(self, lines, vocabs, tag)

    def rows_of_text(self, lines: Iterable[str], vocabs: Vocabs) -> Rows:
        """Reads lines, each an image, a tab and its label, for the loss of the labels."""
        return self.pack_lines(list(map(without_carriage_return, lines)), vocabs, None)[0]

    def columns(self, vocabs: Vocabs) -> dict[str, tuple[int, type]]:
        """Names the arrays of a split's rows in the cache, each with its columns and its type."""
        pixels = self.height * self.width * self.channels
        return {**super().columns(vocabs), "images": (pixels, np.uint8)}

    def parts_of_text(self, split: str, digest: "hashlib._Hash") -> Iterator[PartOfText]:
        """Yields the parts of a split, one after another; digest is fed the images as text."""
        for name, source in hashed_parts(self.source.parts_of(split), digest):
            yield PartOfText(name, hashed_pairs(source.untagged(split), digest), Counter())

    def chunk_packer(self, vocabs: Vocabs) -> PackChunk:
        """Returns what packs the examples of a chunk, each chunk by itself."""
        return lambda pairs, tag, training: packed_images(pairs, vocabs.target, self.image_shape)

    def rows(
        self, arrays: Mapping[str, RowArray], counts: Counts, vocabs: Vocabs, **known: Any
    ) -> ImageRows:
        """Returns rows; known are further fields of `Rows`."""
        return ImageRows(arrays, counts, shape=self.image_shape, **known)

    def summary(self, counts: Counts) -> str:
        """Describes the rows of a split in a line."""
        return f"{counts.rows:,} images of {self.height} x {self.width}"
