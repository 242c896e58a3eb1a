"""Packs examples into rows of a fixed length, several to a row, and losing no token."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from data.packing.best_fit import BestFit
from data.vocab import EOS, PAD

OPEN_ROWS = 512  # sentences of 33 tokens fill rows of 256 to 99 %
_EXAMPLES_PER_CHUNK = 16_384


@dataclass(frozen=True)
class Packed:
    """Holds finished rows; a segment is a piece of an example, numbered from 1, and 0 is padding.

    pieces says where each example went: a line of (example, row, segment) for each piece.  Both
    halves of a pair have the same segment number; only pairs have sources.
    """

    targets_BL: np.ndarray
    segments_BL: np.ndarray
    pieces: np.ndarray
    sources_BM: np.ndarray | None = None
    source_segments_BM: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.targets_BL)

    def arrays(self) -> dict[str, np.ndarray]:
        """Names what the cache keeps of a row."""
        arrays = {
            "targets": self.targets_BL,
            "segments": self.segments_BL,
            "sources": self.sources_BM,
            "source_segments": self.source_segments_BM,
        }
        return {name: array for name, array in arrays.items() if array is not None}


def pack(
    targets: Sequence[np.ndarray],
    length: int,
    sources: Sequence[np.ndarray] | None = None,
    source_length: int | None = None,
    *,
    packs: bool = True,
) -> Packed:
    """Packs all examples at once; each gets an EOS, and of a pair both halves."""
    packer = Packer(length, source_length, packs=packs)
    chunks = [
        slice(i, i + _EXAMPLES_PER_CHUNK) for i in range(0, len(targets), _EXAMPLES_PER_CHUNK)
    ]
    parts = [packer.add(targets[s], None if sources is None else sources[s]) for s in chunks]
    return joined([*parts, packer.finish()])


def joined(parts: Sequence[Packed]) -> Packed:
    """Joins what a packer gave out, one part after another."""
    arrays = [part.arrays() for part in parts]
    whole = {name: np.concatenate([a[name] for a in arrays]) for name in arrays[0]}
    return Packed(
        whole["targets"],
        whole["segments"],
        np.concatenate([part.pieces for part in parts]),
        whole.get("sources"),
        whole.get("source_segments"),
    )


class Side:
    """Holds tokens and segment numbers of the rows of a packer: of targets, or of sources."""

    def __init__(self, length: int, dtype: type, end_id: int):
        self.length, self._end_id = length, end_id
        self._tokens: np.ndarray = np.zeros((0, length), dtype)
        self._segments: np.ndarray = np.zeros((0, length), np.uint16)

    def grow(self, rows: int) -> None:
        more = ((0, rows), (0, 0))
        self._tokens = np.pad(self._tokens, more)
        self._segments = np.pad(self._segments, more)

    def write(
        self,
        examples: Sequence[np.ndarray],
        sizes: np.ndarray,
        rows: np.ndarray,
        starts: np.ndarray,
        segments: np.ndarray,
    ) -> None:
        """Writes the examples, one after another, as pieces of these sizes; each gets its end.

        rows, starts and segments say where each piece goes.
        """
        tokens = _with_ends(examples, self._tokens.dtype, self._end_id)
        within = np.arange(len(tokens)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        places = np.repeat(rows * self.length + starts, sizes) + within
        self._tokens.reshape(-1)[places] = tokens
        self._segments.reshape(-1)[places] = np.repeat(segments, sizes)

    def take(self, taken: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns tokens and segments of some rows, which are no longer kept."""
        out = self._tokens[taken], self._segments[taken]
        self._tokens, self._segments = self._tokens[~taken], self._segments[~taken]
        return out


class BegunRows:
    """Keeps begun rows, which come out once they are closed, in the order of opening."""

    def __init__(self, *sides: Side):
        self.sides = sides
        self._rows = np.zeros(0, np.int64)  # the numbers of the rows kept here, as first opened
        self._rows_out = 0
        self._pending = np.zeros((0, 3), np.int64)

    def add(self, opened: int, pieces: np.ndarray) -> np.ndarray:
        """Makes room for pieces of (example, row, segment); returns the place of each one's row."""
        first_new = self._rows_out + len(self._rows)
        for side in self.sides:
            side.grow(opened - first_new)
        self._rows = np.concatenate([self._rows, np.arange(first_new, opened)])
        self._pending = np.concatenate([self._pending, pieces])
        return np.searchsorted(self._rows, pieces[:, 1])

    def take(self, open_rows: list[int]) -> tuple[list[np.ndarray], np.ndarray]:
        """Returns tokens and segments of each side of the rows that are closed, and their pieces.

        The pieces name a row by its number among all that came out.
        """
        closed = ~np.isin(self._rows, open_rows)
        rows_out = self._rows_out + np.arange(closed.sum())
        places = np.searchsorted(self._rows, self._pending[:, 1])
        done = closed[places]
        pieces = self._pending[done]
        pieces[:, 1] = rows_out[np.cumsum(closed)[places[done]] - 1]
        self._rows, self._pending = self._rows[~closed], self._pending[~done]
        self._rows_out += len(rows_out)
        return [array for side in self.sides for array in side.take(closed)], pieces


class Packer:
    """Packs examples as they come: each piece goes to the open row that it fills best.

    At most OPEN_ROWS rows are open, so that memory is bounded; then the fullest is closed.  Rows
    come out once they are closed, in the order in which they were opened.  An example that is
    longer than a row is cut into pieces.  With a source_length the examples are pairs: a row has
    room for both halves, and a pair of which one half is longer than a row is left out: it is
    counted, but has no piece.
    """

    def __init__(
        self,
        length: int,
        source_length: int | None = None,
        *,
        packs: bool = True,
        dtype: type = np.uint16,
        source_dtype: type = np.uint16,
        end_id: int = EOS,
        source_end_id: int = EOS,
    ):
        limit = OPEN_ROWS if packs else 0
        sides = [Side(length, dtype, end_id)]
        if source_length is not None:
            sides.append(Side(source_length, source_dtype, source_end_id))
        self._fit = BestFit([side.length for side in sides], limit)
        self._begun = BegunRows(*sides)
        self._examples = 0

    def fits(
        self, targets: Sequence[np.ndarray], sources: Sequence[np.ndarray] | None = None
    ) -> np.ndarray:
        """Returns which examples are no longer than a row."""
        lengths = [side.length for side in self._begun.sides]
        return np.all(_sizes_of_sides(targets, sources) <= lengths, axis=1)

    def add(
        self, targets: Sequence[np.ndarray], sources: Sequence[np.ndarray] | None = None
    ) -> Packed:
        """Places some examples and returns the rows that are closed by now."""
        if sources is None:
            halves = [targets]
            examples, sizes = _cut(_sizes_of(targets), self._begun.sides[0].length)
        else:
            examples = np.flatnonzero(self.fits(targets, sources))
            halves = [[half[i] for i in examples.tolist()] for half in (targets, sources)]
            sizes = _sizes_of_sides(*halves)
        rows, starts, segments = self._fit.place(sizes)
        pieces = np.stack([examples + self._examples, rows, segments], axis=1)
        rows_begun = self._begun.add(self._fit.opened, pieces)
        for i, (side, half) in enumerate(zip(self._begun.sides, halves, strict=True)):
            side.write(half, sizes[:, i], rows_begun, starts[:, i], segments)
        self._examples += len(targets)
        return self._take(self._fit.open_rows())

    def finish(self) -> Packed:
        """Returns the rows that are still open."""
        return self._take([])

    def _take(self, open_rows: list[int]) -> Packed:
        (targets_BL, segments_BL, *of_sources), pieces = self._begun.take(open_rows)
        return Packed(targets_BL, segments_BL, pieces, *of_sources)


def _cut(sizes: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Cuts sizes into pieces of at most length; returns examples, and sizes in a column."""
    counts = -(-sizes // length)
    examples = np.repeat(np.arange(len(sizes)), counts)
    pieces = np.full((len(examples), 1), length, np.int64)
    last = np.cumsum(counts) - 1
    pieces[last, 0] = sizes - (counts - 1) * length
    return examples, pieces


def _sizes_of(examples: Sequence[np.ndarray]) -> np.ndarray:
    """Returns the length of each example with its end."""
    return np.fromiter((len(e) + 1 for e in examples), np.int64, len(examples))


def _sizes_of_sides(*sides: Sequence[np.ndarray] | None) -> np.ndarray:
    """Returns the lengths of examples with their end, a column for each side that there is."""
    return np.stack([_sizes_of(side) for side in sides if side is not None], axis=1)


def _with_ends(examples: Sequence[np.ndarray], dtype: np.dtype, end_id: int) -> np.ndarray:
    sizes = _sizes_of(examples)
    tokens = np.full(int(sizes.sum()), end_id, dtype)
    if len(examples):
        is_text = np.ones(len(tokens), bool)
        is_text[np.cumsum(sizes) - 1] = False
        tokens[is_text] = np.concatenate(examples)
    return tokens


def positions(segments_BL: np.ndarray) -> np.ndarray:
    """Numbers the places inside each segment from 0; padding has 0."""
    # A row is at most 65536 long, and half the bytes take half the time.
    place = np.arange(segments_BL.shape[1], dtype=np.uint16)
    starts = np.where(_continues(segments_BL), np.uint16(0), place)
    return np.multiply(
        place - np.maximum.accumulate(starts, axis=1), segments_BL > 0, dtype=np.int32
    )


def inputs(targets_BL: np.ndarray, segments_BL: np.ndarray, begin_id: int = PAD) -> np.ndarray:
    """Shifts targets right inside each segment, which begins with begin_id; padding has 0."""
    continues = _continues(segments_BL)
    shifted = np.zeros(targets_BL.shape, np.int32)
    np.multiply(targets_BL[:, :-1], continues[:, 1:], out=shifted[:, 1:])
    if begin_id:
        shifted[(segments_BL > 0) & ~continues] = begin_id
    return shifted


def _continues(segments_BL: np.ndarray) -> np.ndarray:
    """Returns which places continue the segment of the place before."""
    same = np.zeros(segments_BL.shape, bool)
    np.equal(segments_BL[:, 1:], segments_BL[:, :-1], out=same[:, 1:])
    return same & (segments_BL > 0)
