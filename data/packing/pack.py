"""Packs examples into rows of a fixed length, several to a row, without losing a token."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from data.packing.best_fit import BestFit
from data.vocab import EOS, PAD

OPEN_ROWS = 512  # sentences of 33 tokens fill rows of 256 to 99 %
OPEN_TOKENS = OPEN_ROWS << 16  # fewer rows are open if they are longer

SIDES = (("targets", "segments"), ("sources", "source_segments"))
"""Names of each side's tokens and segment numbers."""


class Packed(NamedTuple):
    """Holds finished rows.  A segment is a piece of an example, numbered from 1; 0 is padding.

    Both halves of a pair have the same segment number; only pairs have sources.
    """

    arrays: dict[str, np.ndarray]
    """What the cache stores, by the names in `SIDES`."""
    pieces: np.ndarray
    """Where each example went: a (example, row, segment) for each piece."""

    @property
    def rows(self) -> int:
        return len(self.arrays["targets"])


class Side:
    """Holds the tokens and segment numbers of a packer's open rows, for targets or for sources."""

    def __init__(self, length: int, dtype: type = np.uint16, end_id: int = EOS):
        self.length, self._end_id = length, end_id
        self._tokens: np.ndarray = np.zeros((0, length), dtype)
        self._segments: np.ndarray = np.zeros((0, length), place_dtype(length))

    def grow(self, rows: int) -> None:
        more = ((0, rows), (0, 0))
        self._tokens = np.pad(self._tokens, more)
        self._segments = np.pad(self._segments, more)

    def write(
        self, examples: Sequence[np.ndarray], sizes: np.ndarray, at: np.ndarray, numbers: np.ndarray
    ) -> None:
        """Writes examples, each with its end token, as pieces of these sizes, and their segments.

        `at` has the first slot of each piece; slots are counted across all rows.
        """
        tokens = np.full(int(sizes.sum()), self._end_id, self._tokens.dtype)
        if len(examples):
            is_text = np.ones(len(tokens), bool)
            is_text[np.cumsum(_sizes_of(examples)) - 1] = False
            tokens[is_text] = np.concatenate(examples)
        within = np.arange(len(tokens)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        slots = np.repeat(at, sizes) + within
        self._tokens.reshape(-1)[slots] = tokens
        self._segments.reshape(-1)[slots] = np.repeat(numbers, sizes)

    def take(self, taken: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Removes some rows, and returns their tokens and segments."""
        out = self._tokens[taken], self._segments[taken]
        self._tokens, self._segments = self._tokens[~taken], self._segments[~taken]
        return out


class Packer:
    """Packs examples in order: each piece goes to the open row that it fills best.

    At most OPEN_ROWS rows are open; beyond that, the fullest is closed.  Rows come in the order in
    which calls of `add` close them; rows that one call closes, in the order in which they were
    opened.  An example longer than a row is cut into pieces.  With two sides, examples are pairs: a
    row has room for both halves.  A pair with a half longer than a row is left out: it is counted,
    but has no piece.
    """

    def __init__(self, *sides: Side, packs: bool = True):
        """Accepts the side of the targets, and perhaps the side of the sources."""
        self._sides = sides
        lengths = [side.length for side in sides]
        open_rows = min(OPEN_ROWS, OPEN_TOKENS // max(lengths)) if packs else 0
        self._fit = BestFit(lengths, open_rows)
        self._examples = 0
        self._rows = np.zeros(0, np.int64)  # the numbers of the rows kept here, in order of opening
        self._rows_out = 0
        self._pending = np.zeros((0, 3), np.int64)  # the pieces in these rows
        self._parts = list[Packed]()  # closed rows

    def fits(self, *halves: Sequence[np.ndarray]) -> np.ndarray:
        """Returns which examples are no longer than a row."""
        return np.all(_sizes_of_sides(halves) <= [side.length for side in self._sides], axis=1)

    def add(self, *halves: Sequence[np.ndarray]) -> None:
        """Packs some examples."""
        count = len(halves[0])
        if len(halves) == 1:
            whole, length = _sizes_of(halves[0]), self._sides[0].length
            counts = -(-whole // length)  # pieces per example
            examples = np.repeat(np.arange(count), counts)
            sizes = np.full((len(examples), 1), length, np.int64)
            sizes[np.cumsum(counts) - 1, 0] = whole - (counts - 1) * length  # the last pieces
        else:
            examples = np.flatnonzero(self.fits(*halves))
            halves = tuple([half[i] for i in examples.tolist()] for half in halves)
            sizes = _sizes_of_sides(halves)
        rows, starts, segments = self._fit.put(sizes)
        first_new = self._rows_out + len(self._rows)
        for side in self._sides:
            side.grow(self._fit.opened - first_new)
        self._rows = np.concatenate([self._rows, np.arange(first_new, self._fit.opened)])
        indices = np.searchsorted(self._rows, rows)
        for i, (side, half) in enumerate(zip(self._sides, halves, strict=True)):
            side.write(half, sizes[:, i], indices * side.length + starts[:, i], segments)
        pieces = np.stack([examples + self._examples, rows, segments], axis=1)
        self._pending = np.concatenate([self._pending, pieces])
        self._examples += count
        self._close_rows_except(self._fit.open_rows())

    def finish(self) -> Packed:
        """Closes all rows, and returns them."""
        self._close_rows_except([])
        names = self._parts[0].arrays
        return Packed(
            {name: np.concatenate([part.arrays[name] for part in self._parts]) for name in names},
            np.concatenate([part.pieces for part in self._parts]),
        )

    def _close_rows_except(self, open_rows: list[int]) -> None:
        """Closes all rows but these; the pieces then count closed rows only."""
        closed = ~np.isin(self._rows, open_rows)
        indices = np.searchsorted(self._rows, self._pending[:, 1])
        done = closed[indices]
        pieces = self._pending[done]
        pieces[:, 1] = self._rows_out + np.cumsum(closed)[indices[done]] - 1
        self._rows, self._pending = self._rows[~closed], self._pending[~done]
        self._rows_out += int(closed.sum())
        arrays = {
            name: array
            for names, side in zip(SIDES, self._sides, strict=False)
            for name, array in zip(names, side.take(closed), strict=True)
        }
        self._parts.append(Packed(arrays, pieces))


def _sizes_of(examples: Sequence[np.ndarray]) -> np.ndarray:
    """Returns the length of each example, including its end token."""
    return np.fromiter((len(e) + 1 for e in examples), np.int64, len(examples))


def _sizes_of_sides(halves: Sequence[Sequence[np.ndarray]]) -> np.ndarray:
    """Returns the lengths of examples, including end tokens, with a column for each side."""
    return np.stack([_sizes_of(half) for half in halves], axis=1)


def place_dtype(length: int) -> type:
    """Returns the dtype for the positions and segments of a row of this length."""
    return np.uint16 if length <= 1 << 16 else np.uint32


def positions(segments_BL: np.ndarray) -> np.ndarray:
    """Numbers the positions inside each segment from 0; padding has 0."""
    # Half the bytes take half the time.
    index: np.ndarray = np.arange(segments_BL.shape[1], dtype=place_dtype(segments_BL.shape[1]))
    starts = np.where(_continues(segments_BL), index.dtype.type(0), index)
    within = index - np.maximum.accumulate(starts, axis=1)
    return np.multiply(within, segments_BL > 0, dtype=np.int32)


def inputs(targets_BL: np.ndarray, segments_BL: np.ndarray, begin_id: int = PAD) -> np.ndarray:
    """Shifts targets right inside each segment, which then begins with begin_id; padding has 0."""
    continues = _continues(segments_BL)
    shifted = np.zeros(targets_BL.shape, np.int32)
    np.multiply(targets_BL[:, :-1], continues[:, 1:], out=shifted[:, 1:])
    if begin_id:
        shifted[(segments_BL > 0) & ~continues] = begin_id
    return shifted


def _continues(segments_BL: np.ndarray) -> np.ndarray:
    """Returns which positions continue the segment of the position before."""
    same = np.zeros(segments_BL.shape, bool)
    np.equal(segments_BL[:, 1:], segments_BL[:, :-1], out=same[:, 1:])
    return same & (segments_BL > 0)
