"""Maps between documents and the rows of a split: where each was read, and where its pieces are."""

import bisect
import dataclasses
import functools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from configs.errors import UserError, brief, did_you_mean
from data.sources.text_files import PLACE
from data.storage.arrays import CheckedArray

T = TypeVar("T")
COLUMNS: dict[str, tuple[int, type]] = {"numbers": (1, np.uint32), "pieces": (2, np.uint32)}
"""Arrays of a split.  `numbers` holds the number of each document in its file.  `pieces` holds the
document and row of each piece, ordered by row and segment, counted from the start of a chunk."""


def noted(
    name: str, examples: Iterable[T], files: list[tuple[str, int]], numbers: list[int]
) -> Iterator[T]:
    """Yields the examples of a part; adds where each was read to `files` and `numbers`.

    If a source does not know this, the name of the part and a count are used instead.
    """
    PLACE.set(None)
    for count, example in enumerate(examples, 1):
        file, number = PLACE.get() or (name, count)
        is_same = count > 1 and files[-1][0] == file
        files.append((file, files.pop()[1] + 1 if is_same else 1))
        numbers.append(number)
        yield example


@dataclasses.dataclass(frozen=True, eq=False)
class Documents:
    """Finds the documents of rows, and the rows of documents.  Documents are numbered as read.

    A binary search finds the chunk, and only that part of the arrays is read.
    """

    files: Sequence[tuple[str, int]]
    """Each file with the number of documents read from it."""
    starts: np.ndarray
    """The number of documents, pieces and rows before each chunk, and the total."""
    arrays: Mapping[str, CheckedArray]

    @classmethod
    def open(cls, folder: Path, split: str, entry: Mapping[str, Any]) -> "Documents | None":
        """Opens a cache's records of a split's documents; None for caches of older versions."""
        if "chunk_sizes" not in entry:
            return None
        starts = np.cumsum([(0, 0, 0), *entry["chunk_sizes"]], axis=0)
        arrays = {name: CheckedArray(folder / f"{split}.{name}.npy") for name in COLUMNS}
        return cls(entry["files"], starts, arrays)

    def names(self, documents: np.ndarray) -> list[str]:
        """Returns the file of each document, a colon, and the number of its line or record."""
        ends = np.cumsum([count for _, count in self.files])
        files = np.searchsorted(ends, documents, side="right").tolist()
        numbers = self.arrays["numbers"][documents][:, 0].tolist()
        return [f"{self.files[file][0]}:{n}" for file, n in zip(files, numbers, strict=True)]

    @functools.cached_property
    def _files(self) -> dict[str, list[range]]:
        """Returns the documents of each file, one range for each time that it was read."""
        files, end = dict[str, list[range]](), 0
        for file, count in self.files:
            files.setdefault(file, []).append(range(end, end := end + count))
        return files

    def named(self, name: str) -> np.ndarray:
        """Returns the documents that FILE, FILE:NUMBER or FILE:FIRST-LAST names."""
        match = re.fullmatch(r"(.+):(\d+)(?:-(\d+))?", name, re.DOTALL)
        file, first, last = (name, 0, 1 << 32)
        if match and name not in self._files:
            file, first, last = match[1], int(match[2]), int(match[3] or match[2])
        if first > last:
            raise UserError(f"{name!r}: legal: the first line before the last one.")
        if file not in self._files:
            raise UserError(
                f"{name!r}: the rows contain no such file.{did_you_mean(file, self._files)}  "
                f"Legal: FILE, FILE:LINE or FILE:LINE-LINE, of {brief(', '.join(self._files))}."
            )
        documents = np.concatenate([
            np.arange(*(self._bisect("numbers", 0, indices, n) for n in (first, last + 1)))
            for indices in self._files[file]
        ])  # fmt: skip
        if not len(documents):
            raise UserError(
                f"{name!r}: no example of this split begins there: the line is blank, inside a "
                "paragraph, held out for validation, dropped, or beyond the end."
            )
        return documents

    def of_row(self, row: int) -> np.ndarray:
        """Returns the document of each segment of a row."""
        chunk = int(np.searchsorted(self.starts[:, 2], row, side="right")) - 1
        (document, first, before), (_, stop, _) = self.starts[chunk : chunk + 2]
        borders = (self._bisect("pieces", 1, range(first, stop), row + i - before) for i in (0, 1))
        return self.arrays["pieces"][np.arange(*borders)][:, 0] + document

    def pieces_of(self, documents: np.ndarray) -> np.ndarray:
        """Returns an array with a (document, row, segment) for each piece of some documents."""
        chunks = np.unique(np.searchsorted(self.starts[:, 0], documents, side="right") - 1)
        pieces = [np.zeros((0, 3), np.int64), *map(self._pieces, chunks.tolist())]
        return np.concatenate([lines[np.isin(lines[:, 0], documents)] for lines in pieces])

    def _bisect(self, name: str, column: int, indices: range, number: int) -> int:
        """Returns the first of these indices of an array where the number is at least `number`."""
        array = self.arrays[name]
        return indices.start + bisect.bisect_left(indices, number, key=lambda i: array[i][column])

    def _pieces(self, chunk: int) -> np.ndarray:
        """Returns an array with a (document, row, segment) for each piece of a chunk."""
        (document, first, row), (_, stop, _) = self.starts[chunk : chunk + 2]
        lines = self.arrays["pieces"][np.arange(first, stop)] + np.array([document, row])
        segments = np.arange(1, len(lines) + 1) - np.searchsorted(lines[:, 1], lines[:, 1])
        return np.column_stack([lines, segments])
