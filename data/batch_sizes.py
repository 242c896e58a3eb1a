"""Holds how many rows each step's batch has, and so which positions of the data order it reads."""

import bisect
import dataclasses
import sys
from collections.abc import Iterable
from typing import TypeVar

T = TypeVar("T")


def value_at(step: int, first: T, stages: Iterable[tuple[int, T]]) -> T:
    """Returns the value at a step, counted from 0: that of the last stage begun, or `first`."""
    return [first, *(value for after, value in stages if after <= step)][-1]


@dataclasses.dataclass(frozen=True)
class BatchSizes:
    """Holds the number of rows in the global batch of each step.  Steps count from 0."""

    rows: int
    stages: tuple[tuple[int, int], ...] = ()
    """Pairs of a step and the number of rows in the batches from that step on, in order."""

    def at(self, step: int) -> int:
        """Returns the number of rows in a step's batch."""
        return value_at(step, self.rows, self.stages)

    def before(self, step: int) -> int:
        """Returns the rows of all batches before a step: the step's first position in the order."""
        begun = [(0, self.rows), *(stage for stage in self.stages if stage[0] < step)]
        ends = [*(after for after, _ in begun[1:]), step]
        return sum(rows * (end - after) for (after, rows), end in zip(begun, ends, strict=True))

    def step_of(self, position: int) -> int:
        """Returns the step whose batch reads a position of the order."""
        return bisect.bisect_right(range(sys.maxsize), position, key=self.before) - 1
