"""Chooses rows for examples by best fit, among a bounded number of open rows."""

import bisect
from collections.abc import Sequence
from operator import sub
from typing import NamedTuple

import numpy as np

_UNFIT = np.iinfo(np.int64).max
Room = Sequence[int]
"""Free positions of a row on each side."""


class Places(NamedTuple):
    """Holds where pieces go: their rows, first positions on each side, and segment numbers."""

    rows: np.ndarray
    starts: np.ndarray
    segments: np.ndarray


class BestFit:
    """Chooses rows for examples by their sizes on each side, targets first.

    At most `limit` rows are open for more examples; beyond that, the fullest is closed.
    """

    def __init__(self, lengths: Sequence[int], limit: int):
        self._lengths = tuple(lengths)
        open_rows = RowsOfTexts if len(lengths) == 1 else RowsOfPairs
        self._open: RowsOfTexts | RowsOfPairs = open_rows(*lengths, limit=limit)
        self._segments: list[int] = []

    @property
    def opened(self) -> int:
        """Returns how many rows have been opened."""
        return len(self._segments)

    def open_rows(self) -> list[int]:
        return self._open.rows()

    def put(self, sizes: np.ndarray) -> Places:
        """Assigns examples to rows; `sizes` has a column for each side."""
        rows, starts, segments = [], [], []
        for size in sizes.tolist():
            if (taken := self._open.take(size)) is None:
                self._segments.append(0)
                taken = self.opened - 1, self._lengths
            row, room = taken
            self._segments[row] += 1
            rows.append(row)
            segments.append(self._segments[row])
            starts.append(list(map(sub, self._lengths, room)))
            self._open.put(row, list(map(sub, room, size)))
        starts_of_sides = np.array(starts, np.int64).reshape(sizes.shape)
        return Places(np.array(rows, np.int64), starts_of_sides, np.array(segments, np.int64))


class RowsOfTexts:
    """Keeps open rows of one side, ordered by free positions; among equals, the newest is first."""

    def __init__(self, length: int, *, limit: int):
        self._limit = limit
        self._open: list[tuple[int, int, int]] = []  # free positions, minus the time of `put`, row
        self._time = 0

    def rows(self) -> list[int]:
        return [row for _, _, row in self._open]

    def take(self, size: Room) -> tuple[int, Room] | None:
        """Removes and returns the fullest row with enough room, if there is one."""
        index = bisect.bisect_left(self._open, (size[0],))
        if index == len(self._open):
            return None
        space, _, row = self._open.pop(index)
        return row, (space,)

    def put(self, row: int, room: Room) -> None:
        """Adds the row that was taken last, or a new one, unless it is full."""
        (space,) = room
        if not space or not self._limit:
            return
        if len(self._open) == self._limit:
            self._open.pop(0)
        self._time += 1
        bisect.insort(self._open, (space, -self._time, row))


class RowsOfPairs:
    """Keeps open rows of two sides in slots.  No order serves every size, so all are compared.

    An empty slot has all its room, so it is chosen only if no open row fits.
    """

    def __init__(self, length: int, source_length: int, *, limit: int):
        slots = max(limit, 1)
        self._lengths, self._limit = (length, source_length), limit
        self._rows = [-1] * slots
        self._room, self._source_room = np.full(slots, length), np.full(slots, source_length)
        self._both = self._room + self._source_room
        self._taken = 0  # the slot of the row taken last, which `put` fills again

    def rows(self) -> list[int]:
        return [row for row in self._rows if row >= 0]

    def take(self, size: Room) -> tuple[int, Room] | None:
        fits = (self._room >= size[0]) & (self._source_room >= size[1])
        self._taken = slot = int(np.argmin(np.where(fits, self._both, _UNFIT)))
        if not fits[slot]:
            self._taken = int(np.argmin(self._both))
            return None
        row, room = self._rows[slot], (int(self._room[slot]), int(self._source_room[slot]))
        return None if row < 0 else (row, room)

    def put(self, row: int, room: Room) -> None:
        if not self._limit or not all(room):
            row, room = -1, self._lengths
        slot = self._taken
        self._rows[slot] = row
        self._room[slot], self._source_room[slot] = room
        self._both[slot] = sum(room)
