"""Says how many rows each step's batch has, and so which places of the data order it reads."""

import bisect
import dataclasses
import sys
from collections.abc import Iterable
from typing import TypeVar

T = TypeVar("T")


def value_at(step: int, first: T, stages: Iterable[tuple[int, T]]) -> T:
    """Returns the value of a step, counted from 0: that of the last stage that has begun, or the
    first one.
    """
    return [first, *(value for after, value in stages if after <= step)][-1]


@dataclasses.dataclass(frozen=True)
class BatchSizes:
    """Holds the rows of the global batch of each step.  Steps count from 0."""

    rows: int
    stages: tuple[tuple[int, int], ...] = ()
    """Numbers of steps, in order, and the rows of the batches after them."""

    def at(self, step: int) -> int:
        """Returns the rows of a step's batch."""
        return value_at(step, self.rows, self.stages)

    def before(self, step: int) -> int:
        """Returns the rows of all batches before a step: the place in the order where it begins."""
        begun = [(0, self.rows), *(stage for stage in self.stages if stage[0] < step)]
        ends = [*(after for after, _ in begun[1:]), step]
        return sum(rows * (end - after) for (after, rows), end in zip(begun, ends, strict=True))

    def step_of(self, place: int) -> int:
        """Returns the step whose batch reads a place of the order."""
        return bisect.bisect_right(range(sys.maxsize), place, key=self.before) - 1
