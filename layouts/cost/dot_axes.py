"""Names the axes of a product of two tensors, as XLA's dot_general numbers them."""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Letters:
    """Numbers the axes of a product's operands and result; equal axes have equal numbers.

    >>> Letters.of((((2,), (0,)), ((), ())), 3, 2)  # BLD,DF->BLF
    Letters(left=(1, 2, 0), right=(0, 5), out=(1, 2, 5))
    >>> Letters.of((((2,), (1,)), ((0,), (0,))), 3, 3)  # BLK,BKM->BLM
    Letters(left=(0, 3, 1), right=(0, 1, 7), out=(0, 3, 7))
    """

    left: tuple[int, ...]
    right: tuple[int, ...]
    out: tuple[int, ...]

    @classmethod
    def of(cls, numbers: Any, left_rank: int, right_rank: int) -> "Letters":
        """Reads pairs of summed axes, then pairs of batch axes, which come first in the result."""
        (left_sum, right_sum), (left_batch, right_batch) = numbers
        left, right = dict[int, int](), dict[int, int]()
        pairs = zip((*left_batch, *left_sum), (*right_batch, *right_sum), strict=True)
        for letter, (a, b) in enumerate(pairs):
            left[a] = right[b] = letter
        shared = len(left)
        for axis in range(left_rank):
            left.setdefault(axis, shared + axis)
        for axis in range(right_rank):
            right.setdefault(axis, shared + left_rank + axis)
        kept = sorted(n for n in (*left.values(), *right.values()) if n >= shared)
        return cls(ordered(left), ordered(right), (*range(len(left_batch)), *kept))

    def at(self, left: int | None, right: int | None, out: int | None) -> tuple[int | None, ...]:
        """Returns the letters at these axes of both operands and the result."""
        axes = ((self.left, left), (self.right, right), (self.out, out))
        return tuple(None if axis is None else letters[axis] for letters, axis in axes)


def ordered(letters: dict[int, int]) -> tuple[int, ...]:
    return tuple(letters[axis] for axis in sorted(letters))
