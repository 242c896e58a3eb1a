"""Packs examples into rows of a fixed length, several to a row, and losing no token."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from data.vocab import EOS

OPEN_ROWS = 512  # sentences of 33 tokens fill rows of 256 to 99 %
_EXAMPLES_A_CHUNK = 16_384


@dataclass(frozen=True)
class Packed:
    """Finished rows; a segment is a piece of an example, numbered from 1, and 0 is padding.

    pieces says where each example went: a line of (example, row, segment) for each piece.
    """

    targets_BL: np.ndarray
    segments_BL: np.ndarray
    pieces: np.ndarray

    def __len__(self) -> int:
        return len(self.targets_BL)

    def arrays(self) -> dict[str, np.ndarray]:
        """Names what the cache keeps of a row."""
        return {"targets": self.targets_BL, "segments": self.segments_BL}


def pack(
    examples: Sequence[np.ndarray], length: int, *, packs: bool = True, dtype: type = np.uint16
) -> Packed:
    """Packs all examples at once; EOS is added to each."""
    packer = Packer(length, packs=packs, dtype=dtype)
    chunks = [packer.add(part) for part in chunked(examples)] + [packer.finish()]
    return Packed(
        np.concatenate([c.targets_BL for c in chunks]),
        np.concatenate([c.segments_BL for c in chunks]),
        np.concatenate([c.pieces for c in chunks]),
    )


def chunked(examples: Sequence[np.ndarray]) -> Iterator[Sequence[np.ndarray]]:
    for start in range(0, len(examples), _EXAMPLES_A_CHUNK):
        yield examples[start : start + _EXAMPLES_A_CHUNK]


class Side:
    """Tokens and segment numbers of the rows that a packer holds: of targets, or of sources."""

    def __init__(self, length: int, dtype: type):
        self.length = length
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
        """Writes the examples, one after another, as pieces of these sizes; EOS is added to each.

        rows, starts and segments say where each piece goes.
        """
        tokens = _joined(examples, self._tokens.dtype)
        within = np.arange(len(tokens)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        places = np.repeat(rows * self.length + starts, sizes) + within
        self._tokens.reshape(-1)[places] = tokens
        self._segments.reshape(-1)[places] = np.repeat(segments, sizes)

    def take(self, taken: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns tokens and segments of some rows, which are no longer held."""
        out = self._tokens[taken], self._segments[taken]
        self._tokens, self._segments = self._tokens[~taken], self._segments[~taken]
        return out


class Held:
    """The rows that a packer has begun; they come out once closed, in the order of opening."""

    def __init__(self, *sides: Side):
        self.sides = sides
        self._rows = np.zeros(0, np.int64)  # the numbers of the rows held here, as first opened
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
        held = np.searchsorted(self._rows, self._pending[:, 1])
        done = closed[held]
        pieces = self._pending[done]
        pieces[:, 1] = rows_out[np.cumsum(closed)[held[done]] - 1]
        self._rows, self._pending = self._rows[~closed], self._pending[~done]
        self._rows_out += len(rows_out)
        return [array for side in self.sides for array in side.take(closed)], pieces


class Packer:
    """Packs examples as they come: each piece goes to the open row that it fills best.

    At most OPEN_ROWS rows are open, so that memory is bounded; then the fullest is closed.  Rows
    come out once they are closed, in the order in which they were opened.  An example that is
    longer than a row is cut into pieces.
    """

    def __init__(self, length: int, *, packs: bool = True, dtype: type = np.uint16):
        self.length = length
        self._fit = _BestFit(length, OPEN_ROWS if packs else 0)
        self._held = Held(Side(length, dtype))
        self._examples = 0

    def add(self, examples: Sequence[np.ndarray]) -> Packed:
        """Places some examples and returns the rows that are closed by now."""
        example, sizes = _cut(sizes_of(examples), self.length)
        rows, starts, segments = self._fit.place(sizes.tolist())
        placed = np.stack([example + self._examples, rows, segments], axis=1)
        at = self._held.add(self._fit.opened, placed)
        self._held.sides[0].write(examples, sizes, at, starts, segments)
        self._examples += len(examples)
        return self._take(self._fit.open_rows())

    def finish(self) -> Packed:
        """Returns the rows that are still open."""
        return self._take([])

    def _take(self, open_rows: list[int]) -> Packed:
        (targets_BL, segments_BL), pieces = self._held.take(open_rows)
        return Packed(targets_BL, segments_BL, pieces)


class _BestFit:
    """Chooses rows for pieces by size; a bit set of the free spaces finds the tightest at once."""

    def __init__(self, length: int, limit: int):
        self._length = length
        self._limit = limit
        self._by_space: list[list[int]] = [[] for _ in range(length + 1)]
        self._spaces = 0  # bit s: some open row has s places free
        self._open = 0
        self._last_segment: dict[int, int] = {}
        self.opened = 0

    def open_rows(self) -> list[int]:
        return list(self._last_segment)

    def place(self, sizes: list[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns row, first place and segment number of each piece."""
        rows, starts, segments = [], [], []
        for size in sizes:
            row, space = self._take_row(size)
            segment = self._last_segment.get(row, 0) + 1
            rows.append(row)
            starts.append(self._length - space)
            segments.append(segment)
            if space > size and self._limit:
                self._last_segment[row] = segment
                self._put_back(row, space - size)
            else:
                self._last_segment.pop(row, None)
        return np.array(rows, np.int64), np.array(starts, np.int64), np.array(segments, np.int64)

    def _take_row(self, size: int) -> tuple[int, int]:
        fitting = self._spaces >> size
        if not fitting:
            self.opened += 1
            return self.opened - 1, self._length
        space = size + (fitting & -fitting).bit_length() - 1
        return self._pop(space), space

    def _put_back(self, row: int, space: int) -> None:
        if self._open == self._limit:
            fullest = (self._spaces & -self._spaces).bit_length() - 1
            del self._last_segment[self._pop(fullest)]
        self._by_space[space].append(row)
        self._spaces |= 1 << space
        self._open += 1

    def _pop(self, space: int) -> int:
        rows = self._by_space[space]
        row = rows.pop()
        if not rows:
            self._spaces ^= 1 << space
        self._open -= 1
        return row


def _cut(sizes: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Cuts sizes into pieces of at most length; returns each piece's example and size."""
    counts = -(-sizes // length)
    example = np.repeat(np.arange(len(sizes)), counts)
    pieces = np.full(len(example), length, np.int64)
    last = np.cumsum(counts) - 1
    pieces[last] = sizes - (counts - 1) * length
    return example, pieces


def sizes_of(examples: Sequence[np.ndarray]) -> np.ndarray:
    """Returns the length of each example with its EOS."""
    return np.fromiter((len(e) + 1 for e in examples), np.int64, len(examples))


def _joined(examples: Sequence[np.ndarray], dtype: np.dtype) -> np.ndarray:
    sizes = sizes_of(examples)
    tokens = np.full(int(sizes.sum()), EOS, dtype)
    if len(examples):
        is_text = np.ones(len(tokens), bool)
        is_text[np.cumsum(sizes) - 1] = False
        tokens[is_text] = np.concatenate(examples)
    return tokens


def unpack(packed: Packed) -> list[np.ndarray]:
    """Returns the examples again, each with its EOS, in their order: the inverse of `pack`."""
    order = np.argsort(packed.pieces[:, 0], kind="stable")
    examples: list[list[np.ndarray]] = []
    for example, row, segment in packed.pieces[order]:
        tokens = packed.targets_BL[row][packed.segments_BL[row] == segment]
        if example == len(examples):
            examples.append([])
        examples[example].append(tokens)
    return [np.concatenate(pieces) for pieces in examples]


def positions(segments_BL: np.ndarray) -> np.ndarray:
    """Numbers the places inside each segment from 0; padding has 0."""
    # A row is at most 65536 long, and half the bytes take half the time.
    place = np.arange(segments_BL.shape[1], dtype=np.uint16)
    starts = np.where(_continues(segments_BL), np.uint16(0), place)
    return np.multiply(
        place - np.maximum.accumulate(starts, axis=1), segments_BL > 0, dtype=np.int32
    )


def inputs(targets_BL: np.ndarray, segments_BL: np.ndarray) -> np.ndarray:
    """Shifts targets right inside each segment; a segment begins with 0."""
    shifted = np.zeros(targets_BL.shape, np.int32)
    np.multiply(targets_BL[:, :-1], _continues(segments_BL)[:, 1:], out=shifted[:, 1:])
    return shifted


def _continues(segments_BL: np.ndarray) -> np.ndarray:
    """Tells which places go on with the segment of the place before."""
    same = np.zeros(segments_BL.shape, bool)
    np.equal(segments_BL[:, 1:], segments_BL[:, :-1], out=same[:, 1:])
    return same & (segments_BL > 0)
