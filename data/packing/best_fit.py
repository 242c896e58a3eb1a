"""Chooses rows for examples by best fit, among a bounded number of open rows."""

from typing import NamedTuple

import numpy as np

_UNFIT = np.iinfo(np.int64).max


class Places(NamedTuple):
    """Says where pieces go: their rows, first places on each side, and segment numbers."""

    rows: np.ndarray
    starts: np.ndarray
    segments: np.ndarray

    @classmethod
    def of(
        cls, rows: list[int], starts: list[list[int]], segments: list[int], *, sides: int
    ) -> "Places":
        starts_of_sides = np.array(starts, np.int64).reshape(-1, sides)
        return cls(np.array(rows, np.int64), starts_of_sides, np.array(segments, np.int64))


class BestFit:
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

    def place(self, sizes: np.ndarray) -> Places:
        """Places pieces, whose sizes stand in one column."""
        rows, starts, segments = [], [], []
        for size in sizes[:, 0].tolist():
            row, space = self._take_row(size)
            segment = self._last_segment.get(row, 0) + 1
            rows.append(row)
            starts.append([self._length - space])
            segments.append(segment)
            if space > size and self._limit:
                self._last_segment[row] = segment
                self._put_back(row, space - size)
            else:
                self._last_segment.pop(row, None)
        return Places.of(rows, starts, segments, sides=1)

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


class BestFitOfPairs:
    """Chooses rows for pairs by both sizes, among slots that each stand for one row.

    A slot whose row is not opened yet has all its room, so that it is chosen only where no open
    row fits.
    """

    def __init__(self, length: int, source_length: int, limit: int):
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

    def place(self, sizes: np.ndarray) -> Places:
        """Places pairs, whose sizes stand in two columns, that of the target first."""
        rows, starts, segments = [], [], []
        for size, source_size in sizes.tolist():
            slot = self._slot_for(source_size, size)
            source_room, room = int(self._source_room[slot]), int(self._room[slot])
            self._last_segment[slot] += 1
            rows.append(self._rows[slot])
            starts.append([self._length - room, self._source_length - source_room])
            segments.append(self._last_segment[slot])
            self._set_room(slot, source_room - source_size, room - size)
            if not self._packs or source_room == source_size or room == size:
                self._close(slot)
        return Places.of(rows, starts, segments, sides=2)

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
