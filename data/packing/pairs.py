"""Packs pairs into rows with a source side and a target side, each of a fixed length."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from data.packing.pack import OPEN_ROWS, Held, Packed, Side, chunked, sizes_of

_UNFIT = np.iinfo(np.int64).max


@dataclass(frozen=True)
class PackedPairs(Packed):
    """Finished rows of pairs; both halves of a pair have the same segment number."""

    sources_BM: np.ndarray
    source_segments_BM: np.ndarray

    def arrays(self) -> dict[str, np.ndarray]:
        return {
            **super().arrays(),
            "sources": self.sources_BM,
            "source_segments": self.source_segments_BM,
        }


def pack_pairs(
    sources: Sequence[np.ndarray],
    targets: Sequence[np.ndarray],
    source_length: int,
    length: int,
    *,
    packs: bool = True,
    source_dtype: type = np.uint16,
    dtype: type = np.uint16,
) -> PackedPairs:
    """Packs all pairs at once; EOS is added to both halves of each."""
    packer = PairPacker(source_length, length, packs=packs, source_dtype=source_dtype, dtype=dtype)
    halves = zip(chunked(sources), chunked(targets), strict=True)
    return joined_pairs([packer.add(*part) for part in halves] + [packer.finish()])


def joined_pairs(parts: Sequence[PackedPairs]) -> PackedPairs:
    """Returns what a packer gave out, one part after another, as one."""
    return PackedPairs(
        np.concatenate([p.targets_BL for p in parts]),
        np.concatenate([p.segments_BL for p in parts]),
        np.concatenate([p.pieces for p in parts]),
        np.concatenate([p.sources_BM for p in parts]),
        np.concatenate([p.source_segments_BM for p in parts]),
    )


class PairPacker:
    """Packs pairs as they come, each into the fullest open row that has room for both halves.

    Open rows, and the order in which rows come out, are as a Packer's.  A pair of which one half
    is longer than a row is left out: it is counted, but has no piece.
    """

    def __init__(
        self,
        source_length: int,
        length: int,
        *,
        packs: bool = True,
        source_dtype: type = np.uint16,
        dtype: type = np.uint16,
    ):
        self._lengths = np.array([source_length, length])
        self._fit = _BestFit(source_length, length, OPEN_ROWS if packs else 0)
        self._sources, self._targets = Side(source_length, source_dtype), Side(length, dtype)
        self._held = Held(self._targets, self._sources)
        self._pairs = 0

    def fits(self, sources: Sequence[np.ndarray], targets: Sequence[np.ndarray]) -> np.ndarray:
        """Tells which pairs are no longer than a row."""
        sizes = np.stack([sizes_of(sources), sizes_of(targets)], axis=1)
        return np.all(sizes <= self._lengths, axis=1)

    def add(self, sources: Sequence[np.ndarray], targets: Sequence[np.ndarray]) -> PackedPairs:
        """Places some pairs and returns the rows that are closed by now."""
        kept = np.flatnonzero(self.fits(sources, targets))
        halves = [[half[i] for i in kept.tolist()] for half in (sources, targets)]
        sizes = np.stack([sizes_of(half) for half in halves], axis=1)
        rows, starts, segments = self._fit.place(sizes.tolist())
        placed = np.stack([kept + self._pairs, rows, segments], axis=1)
        at = self._held.add(self._fit.opened, placed)
        for i, side in enumerate((self._sources, self._targets)):
            side.write(halves[i], sizes[:, i], at, starts[:, i], segments)
        self._pairs += len(sources)
        return self._take(self._fit.open_rows())

    def finish(self) -> PackedPairs:
        """Returns the rows that are still open."""
        return self._take([])

    def _take(self, open_rows: list[int]) -> PackedPairs:
        (targets_BL, segments_BL, sources_BM, source_segments_BM), pieces = self._held.take(
            open_rows
        )
        return PackedPairs(targets_BL, segments_BL, pieces, sources_BM, source_segments_BM)


class _BestFit:
    """Chooses rows for pairs by both sizes, among slots that each stand for one row.

    A slot whose row is not opened yet has all its room, so that it is chosen only where no open
    row fits.
    """

    def __init__(self, source_length: int, length: int, limit: int):
        slots = max(limit, 1)
        self._source_length, self._length = source_length, length
        self._packs = limit > 0
        self._source_room = np.full(slots, source_length)
        self._room = np.full(slots, length)
        self._both = self._source_room + self._room
        self._rows = [-1] * slots
        self._last_segment = [0] * slots
        self.opened = 0

    def open_rows(self) -> list[int]:
        return [row for row in self._rows if row >= 0]

    def place(self, sizes: list[list[int]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns row, first place on each side and segment number of each pair."""
        rows, starts, segments = [], [], []
        for source_size, size in sizes:
            slot = self._slot_for(source_size, size)
            source_room, room = int(self._source_room[slot]), int(self._room[slot])
            self._last_segment[slot] += 1
            rows.append(self._rows[slot])
            starts.append((self._source_length - source_room, self._length - room))
            segments.append(self._last_segment[slot])
            self._set_room(slot, source_room - source_size, room - size)
            if not self._packs or source_room == source_size or room == size:
                self._close(slot)
        return (
            np.array(rows, np.int64),
            np.array(starts, np.int64).reshape(-1, 2),
            np.array(segments, np.int64),
        )

    def _slot_for(self, source_size: int, size: int) -> int:
        fits = (self._source_room >= source_size) & (self._room >= size)
        slot = int(np.argmin(np.where(fits, self._both, _UNFIT)))
        if not fits[slot]:
            slot = int(np.argmin(self._both))
            self._close(slot)
        if self._rows[slot] < 0:
            self._rows[slot], self.opened = self.opened, self.opened + 1
        return slot

    def _close(self, slot: int) -> None:
        self._rows[slot] = -1
        self._last_segment[slot] = 0
        self._set_room(slot, self._source_length, self._length)

    def _set_room(self, slot: int, source_room: int, room: int) -> None:
        self._source_room[slot], self._room[slot] = source_room, room
        self._both[slot] = source_room + room


def unpack_pairs(packed: PackedPairs) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """Returns the packed pairs by their numbers, each half with its EOS."""
    pairs = {}
    for pair, row, segment in packed.pieces.tolist():
        pairs[pair] = (
            packed.sources_BM[row][packed.source_segments_BM[row] == segment],
            packed.targets_BL[row][packed.segments_BL[row] == segment],
        )
    return pairs
