"""Orders rows by endless permutations: one set of rows, or several sets at given rates."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from data.batch_sizes import BatchSizes

BLOCK = 4096
"""Positions in a block; a rate is exact to half of one part in this many."""
TABLE_ROWS = 1 << 23
"""The most rows that are ordered by a table, of 8 bytes a row.  Smaller sets keep the order of the
first versions; larger ones need no memory."""
_ROUNDS = 8


def shuffled(seed: int, positions: np.ndarray, rows: int, stream: int = 0) -> np.ndarray:
    """Returns the rows at some positions of an endless sequence, which permutes them in each epoch.

    Each stream of a seed has its own permutations.
    """
    epochs = positions // rows
    ids = np.empty(len(positions), np.int64)
    for epoch in np.unique(epochs).tolist():
        now = epochs == epoch
        if rows <= TABLE_ROWS:
            ids[now] = _permutations(seed, stream, rows)(epoch)[positions[now] % rows]
        else:
            ids[now] = permuted(positions[now] % rows, rows, _numbers(_ROUNDS, seed, epoch, stream))
    return ids


def places_of_row(
    seed: int, row: int, rows: int, first: int, stop: int, stream: int = 0
) -> Iterator[int]:
    """Yields the positions in [first, stop) at which `shuffled` has a row, in order."""
    for epoch in range(first // rows, -(-stop // rows)):
        if rows <= TABLE_ROWS:  # its position is the rank of its random number: no sorting
            numbers = _numbers(rows, seed, epoch, stream)
            equal_before = np.count_nonzero(numbers[:row] == numbers[row])
            position = int(np.count_nonzero(numbers < numbers[row]) + equal_before)
        else:
            keys = _numbers(_ROUNDS, seed, epoch, stream)
            position = int(permuted(np.array([row]), rows, keys, inverse=True)[0])
        if first <= (position := epoch * rows + position) < stop:
            yield position


def permuted(at: np.ndarray, rows: int, keys: np.ndarray, *, inverse: bool = False) -> np.ndarray:
    """Returns the rows at some positions of a permutation, computed for these positions alone.

    A Feistel network with one key per round permutes the numbers of 2 * `half` bits, at most four
    times as many as there are rows.  A number beyond the rows is permuted again (cycle walking:
    Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002).
    """
    half = max(1, ((rows - 1).bit_length() + 1) // 2)
    ids = _network(at.astype(np.uint64), half, keys, inverse)
    while (outside := ids >= rows).any():
        ids[outside] = _network(ids[outside], half, keys, inverse)
    return ids.astype(np.int64)


def _network(numbers: np.ndarray, half: int, keys: np.ndarray, inverse: bool) -> np.ndarray:
    bits, mask, shift = np.uint64(half), np.uint64((1 << half) - 1), np.uint64(33)
    left, right = numbers >> bits, numbers & mask
    if inverse:  # the inverse of a round, with the halves swapped before and after
        left, right, keys = right, left, keys[::-1]
    for key in keys:
        mixed = right + key  # mixes all bits, as the last step of MurmurHash3 does
        for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
            mixed = (mixed ^ (mixed >> shift)) * np.uint64(factor)
        left, right = right, left ^ ((mixed ^ (mixed >> shift)) & mask)
    if inverse:
        left, right = right, left
    return (left << bits) | right


@functools.lru_cache(maxsize=1024)
def _permutations(seed: int, stream: int, rows: int) -> Callable[[int], np.ndarray]:
    """Returns the function that orders all rows by random numbers, of 8 bytes a row.

    Each stream caches two epochs, because a batch may span both, and other streams evict neither.
    Grain's own `shuffle` takes 25 to 35 us a row, 35 ms for a batch of 1024.
    """

    @functools.lru_cache(maxsize=2)
    def permutation(epoch: int) -> np.ndarray:
        return np.argsort(_numbers(rows, seed, epoch, stream), kind="stable")

    return permutation


def _numbers(count: int, *entropy: int) -> np.ndarray:
    """Draws numbers that NumPy keeps the same in every version, unlike `Generator.permutation`."""
    return np.random.PCG64(np.random.SeedSequence(entropy)).random_raw(count)


Quotas = tuple[int, ...]
"""The number of positions that each part has in a block."""


@dataclasses.dataclass(frozen=True)
class MixtureOrder:
    """Orders the rows of several parts, each with a fixed share of every block.

    Each part follows its own permutations, so that no row is lost or repeated.  Parts after the
    last quota have no rows in a block, and do not change it.
    """

    rows: tuple[int, ...]
    quotas: Quotas
    stages: tuple[tuple[int, Quotas], ...] = ()
    """Pairs of a step and the quotas of the batches from that step on."""
    first_stream: int = 1
    """The stream of the first part.  With 0, a single part is ordered as without a mixture."""

    @classmethod
    def of(
        cls,
        rows: Sequence[int],
        rates: Sequence[float],
        stages: Sequence[tuple[int, Sequence[float]]] = (),
    ) -> "MixtureOrder":
        """Makes an order from rates, which may have any sum."""
        assert len(rates) <= len(rows) <= BLOCK and min(rows) > 0
        of_stages = ((step, _quotas(later_rates)) for step, later_rates in stages)
        return cls(tuple(rows), _quotas(rates), tuple(of_stages))

    def rates_after(self, step: int) -> tuple[float, ...]:
        """Returns the share of rows that each part has after a number of steps."""
        quotas = self._stage(step)[1]
        return tuple(quota / BLOCK for quota in (*quotas, *[0] * (len(self.rows) - len(quotas))))

    def rows_of_step(self, seed: int, step: int, sizes: BatchSizes) -> np.ndarray:
        """Returns the rows of a step's global batch.

        The first batch of a stage begins a new block, in which each part continues where it was.
        """
        first, quotas = self._stage(step)
        positions = np.arange(sizes.before(step), sizes.before(step + 1)) - sizes.before(first)
        return self._ids(seed, positions, quotas, self.drawn_before(seed, first, sizes))

    def _stage(self, step: int) -> tuple[int, Quotas]:
        """Returns the first step and the quotas of the stage to which a step belongs."""
        return [(0, self.quotas), *(stage for stage in self.stages if stage[0] <= step)][-1]

    def drawn_before(self, seed: int, step: int, sizes: BatchSizes) -> np.ndarray:
        """Returns how many rows of each part are in the batches before a step."""
        if not step:
            return np.zeros(len(self.rows), np.int64)
        first, quotas = self._stage(step - 1)
        blocks, rest = divmod(sizes.before(step) - sizes.before(first), BLOCK)
        parts, drawn = _block(quotas, seed, blocks)[0][:rest], self.drawn_before(seed, first, sizes)
        drawn[: len(quotas)] += blocks * np.array(quotas)
        return drawn + np.bincount(parts, minlength=len(drawn))

    def steps_of_row(
        self, seed: int, row: int, sizes: BatchSizes, first: int, stop: int
    ) -> Iterator[int]:
        """Yields the steps in [first, stop) whose batches contain a row, in order."""
        part = int(np.searchsorted(np.cumsum(self.rows), row, side="right"))
        row_of_part = row - sum(self.rows[:part])
        borders = [first, *(s for s, _ in self.stages if first < s < stop), stop]
        for start, end in itertools.pairwise(borders):
            stage, quotas = self._stage(start)
            drawn, low, high = (
                int(self.drawn_before(seed, step, sizes)[part]) for step in (stage, start, end)
            )
            stream = self.first_stream + part
            for draw in places_of_row(seed, row_of_part, self.rows[part], low, high, stream):
                block, rank = divmod(draw - drawn, quotas[part])
                position = np.flatnonzero(_block(quotas, seed, block)[0] == part)[rank]
                yield sizes.step_of(sizes.before(stage) + block * BLOCK + int(position))

    def _ids(self, seed: int, at: np.ndarray, quotas: Quotas, drawn: np.ndarray) -> np.ndarray:
        """Returns the rows at some positions of a stage; `drawn` counts each part's rows before."""
        blocks, within = at // BLOCK, at % BLOCK
        # The part at each position, and how many positions before it had that part.
        parts, draws = np.empty_like(at), np.empty_like(at)
        for block in np.unique(blocks).tolist():
            now = blocks == block
            order, ranks = _block(quotas, seed, block)
            parts[now] = order[within[now]]
            before = drawn[: len(quotas)] + block * np.array(quotas)
            draws[now] = before[parts[now]] + ranks[within[now]]
        firsts = np.cumsum(self.rows) - self.rows
        ids = np.empty(len(at), np.int64)
        for part in np.unique(parts).tolist():
            now = parts == part
            stream = self.first_stream + part
            ids[now] = firsts[part] + shuffled(seed, draws[now], self.rows[part], stream)
        return ids


def _quotas(rates: Sequence[float]) -> Quotas:
    """Divides a block by largest remainders; parts with rates above 0 get at least one position."""
    has_rows = np.array(rates) > 0
    exact = np.array(rates, np.float64) / np.sum(rates, dtype=np.float64) * BLOCK
    quotas = np.maximum(np.floor(exact), has_rows)
    while (missing := BLOCK - quotas.sum()) != 0:
        over = np.where(has_rows, exact - quotas, -np.inf)
        at = np.argmax(over) if missing > 0 else np.argmin(np.where(quotas > 1, over, np.inf))
        quotas[at] += np.sign(missing)
    return tuple(quotas.astype(int).tolist())


@functools.lru_cache(maxsize=16)
def _block(quotas: tuple[int, ...], seed: int, block: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the part at each position of a block, and the position's rank within its part.

    The j-th of a part's q positions is drawn from the j-th of q equal spans, so that short
    stretches have the rates, too.
    """
    parts = np.repeat(np.arange(len(quotas)), quotas)
    ranks = np.concatenate([np.arange(quota) for quota in quotas])
    numbers = _numbers(len(parts), seed, block, len(quotas) + 1) / 2.0**64
    order = np.argsort((ranks + numbers) / np.repeat(quotas, quotas), kind="stable")
    return parts[order], ranks[order]
