"""Knows which documents the rows of a split hold: where each was read, and where its pieces are."""

import bisect
import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from configs.errors import UserError, brief, did_you_mean
from data.packing.pack import Packed
from data.sources.text_files import PLACE
from data.storage.arrays import CheckedArray

T = TypeVar("T")
COLUMNS: dict[str, tuple[int, type]] = {"numbers": (1, np.uint32), "pieces": (2, np.uint32)}
"""Arrays of a split: the number of each document in its file, and the document and row of each
piece, by rows and segments, counted from the start of a chunk."""


def pieces_of_rows(packed: Packed) -> np.ndarray:
    """Returns the document and the row of each piece of a chunk, by rows and segments."""
    _, rows, segments = packed.pieces.T
    return packed.pieces[np.lexsort((segments, rows)), :2].astype(np.uint32)


def noted(
    name: str, examples: Iterable[T], files: list[tuple[str, int]], numbers: list[int]
) -> Iterator[T]:
    """Yields the examples of a part; adds to its files, with their counts, and to the numbers.

    The name of the part, and a count, stand for places that a source does not know.
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
    """Finds the documents of rows, and the rows of documents, which are counted as they are read.

    Bisection finds the chunk; no more of the arrays is read.
    """

    files: Sequence[tuple[str, int]]
    """Each file with the number of its documents."""
    starts: np.ndarray
    """Documents, pieces and rows before each chunk, and before the end."""
    arrays: Mapping[str, CheckedArray]

    @classmethod
    def open(
        cls, folder: Path, split: str, entry: Mapping[str, Any], remedy: str
    ) -> "Documents | None":
        """Opens what a cache knows of a split's documents; those of older versions know nothing."""
        if "chunk_sizes" not in entry:
            return None
        starts = np.cumsum([(0, 0, 0), *entry["chunk_sizes"]], axis=0)
        paths = {name: folder / f"{split}.{name}.npy" for name in COLUMNS}
        return cls(entry["files"], starts, {n: CheckedArray(p, remedy) for n, p in paths.items()})

    def names(self, documents: np.ndarray) -> list[str]:
        """Returns the file of each document, a colon, and the number of its line or record."""
        ends = np.cumsum([count for _, count in self.files])
        files = np.searchsorted(ends, documents, side="right").tolist()
        numbers = self.arrays["numbers"][documents][:, 0].tolist()
        return [f"{self.files[file][0]}:{n}" for file, n in zip(files, numbers, strict=True)]

    def named(self, name: str) -> np.ndarray:
        """Returns the documents that FILE, FILE:NUMBER or FILE:FIRST-LAST names."""
        known = {file for file, _ in self.files}
        match = None if name in known else re.fullmatch(r"(.+):(\d+)(?:-(\d+))?", name, re.DOTALL)
        file, first, last = match.groups() if match else (name, 0, 1 << 32)
        if file not in known:
            raise UserError(
                f"{name!r}: the rows are from no such file.{did_you_mean(file, known)}  "
                f"Legal: FILE, FILE:LINE or FILE:LINE-LINE, of {brief(', '.join(sorted(known)))}."
            )
        documents, end = [np.zeros(0, np.int64)], 0
        for other, count in self.files:
            start, end = end, end + count
            if other == file:
                borders = (
                    bisect.bisect_left(
                        range(start, end), n, key=lambda d: int(self.arrays["numbers"][d][0])
                    )
                    for n in (int(first), int(last or first) + 1)
                )
                documents.append(np.arange(start, end)[slice(*borders)])
        if not any(map(len, documents)):
            raise UserError(
                f"{name!r}: no example of this split begins there: the line is blank, inside of a "
                "paragraph, held out for validation, dropped, or beyond the end."
            )
        return np.concatenate(documents)

    def of_row(self, row: int) -> np.ndarray:
        """Returns the document of each segment of a row."""
        pieces = self._pieces(int(np.searchsorted(self.starts[:, 2], row, side="right")) - 1)
        return pieces[pieces[:, 1] == row, 0]

    def pieces_of(self, documents: np.ndarray) -> np.ndarray:
        """Returns a line of (document, row, segment) for each piece of some documents."""
        chunks = np.unique(np.searchsorted(self.starts[:, 0], documents, side="right") - 1)
        pieces = [np.zeros((0, 3), np.int64), *map(self._pieces, chunks.tolist())]
        return np.concatenate([lines[np.isin(lines[:, 0], documents)] for lines in pieces])

    def _pieces(self, chunk: int) -> np.ndarray:
        """Returns a line of (document, row, segment) for each piece of a chunk."""
        (document, first, row), (_, stop, _) = self.starts[chunk : chunk + 2]
        lines = self.arrays["pieces"][np.arange(first, stop)] + np.array([document, row])
        segments = np.arange(1, len(lines) + 1) - np.searchsorted(lines[:, 1], lines[:, 1])
        return np.column_stack([lines, segments])
