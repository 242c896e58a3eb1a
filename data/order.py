"""Reads training rows in an order that is a pure function of (seed, step, batch sizes).

The batches of training are consecutive parts of an endless sequence, which permutes all rows in
each epoch.  So no row is lost if a batch spans two epochs.
"""

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np

from data.batch_sizes import BatchSizes
from data.packing.rows import NO_ROW, Rows

Batch = dict[str, np.ndarray]
Span = tuple[int, int]
"""First row and end of the part of each batch that a host reads."""
T = TypeVar("T")

VERSION = 2
"""Version of the order; the first one ordered any number of rows by a table."""
_THREADS = 2
_BATCHES_AHEAD = 8


def batches(
    rows: Rows, seed: int, sizes: BatchSizes, first_step: int, host_rows: Span | None = None
) -> Iterator[tuple[np.ndarray, Batch]]:
    """Yields (row ids of the global batch, this host's rows of its arrays) from `first_step` on.

    Threads read ahead.  Hosts with adjacent spans together read what one host would.  A span counts
    rows of the arrays, which may be shorter than the rows that the ids name.
    """
    start, stop = host_rows or (0, sizes.at(first_step) * rows.per_row)
    first, last = start // rows.per_row, -(-stop // rows.per_row)
    span = slice(start - first * rows.per_row, stop - first * rows.per_row)

    def read(step: int) -> tuple[np.ndarray, Batch]:
        ids = rows.order.rows_of_step(seed, step, sizes)
        return ids, {name: array[span] for name, array in rows.batch(ids[first:last]).items()}

    return read_ahead(read, itertools.count(first_step))


def in_order(
    rows: Rows, batch_sequences: int, host_rows: Span | None = None, chosen: range | None = None
) -> Iterator[tuple[np.ndarray, Batch]]:
    """Yields all rows once, or only the chosen ones; empty rows (NO_ROW) fill up the last batch.

    Threads read ahead.
    """
    start, stop = host_rows or (0, batch_sequences)
    chosen = range(len(rows)) if chosen is None else chosen

    def read(first: int) -> tuple[np.ndarray, Batch]:
        ids = np.arange(first, first + batch_sequences)
        ids = np.where(ids < chosen.stop, ids, NO_ROW)
        return ids, rows.batch(ids[start:stop])

    return read_ahead(read, range(chosen.start, chosen.stop, batch_sequences))


def read_ahead(read: Callable[[int], T], numbers: Iterable[int]) -> Iterator[T]:
    """Yields the result of `read` for each number, in order; threads read a few ahead."""
    pool, remaining = ThreadPoolExecutor(_THREADS, "read ahead"), iter(numbers)
    try:
        ahead = deque(pool.submit(read, n) for n in itertools.islice(remaining, _BATCHES_AHEAD))
        while ahead:
            ahead.extend(pool.submit(read, n) for n in itertools.islice(remaining, 1))
            yield ahead.popleft().result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
