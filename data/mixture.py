"""Orders rows by endless permutations, of one set of rows or of several at given rates."""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import numpy as np

_BLOCK = 4096  # places; a rate is kept to half of one part in this many
TABLE_ROWS = 1 << 23
"""The most rows that a table orders, of 8 bytes a row: smaller sets keep the order of the first
versions, larger ones need no memory."""
_ROUNDS = 8


def shuffled(seed: int, places: np.ndarray, rows: int, stream: int = 0) -> np.ndarray:
    """Returns the rows at some places of an endless sequence: each epoch's own permutation.

    Streams of one seed have permutations of their own.
    """
    epochs = places // rows
    ids = np.empty(len(places), np.int64)
    for epoch in np.unique(epochs).tolist():
        now = epochs == epoch
        if rows <= TABLE_ROWS:
            ids[now] = _permutations(seed, stream, rows)(epoch)[places[now] % rows]
        else:
            ids[now] = permuted(places[now] % rows, rows, _numbers(_ROUNDS, seed, epoch, stream))
    return ids


def permuted(places: np.ndarray, rows: int, keys: np.ndarray) -> np.ndarray:
    """Returns the rows at some places of a permutation, computed for these places alone.

    A Feistel network with a key a round permutes the numbers of twice `half` bits, of which at
    most four times as many as rows there are; a number beyond the rows is permuted again (Black
    and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002: cycle walking).
    """
    half = max(1, ((rows - 1).bit_length() + 1) // 2)
    ids = _network(places.astype(np.uint64), half, keys)
    while (outside := ids >= rows).any():
        ids[outside] = _network(ids[outside], half, keys)
    return ids.astype(np.int64)


def _network(numbers: np.ndarray, half: int, keys: np.ndarray) -> np.ndarray:
    bits, mask, shift = np.uint64(half), np.uint64((1 << half) - 1), np.uint64(33)
    left, right = numbers >> bits, numbers & mask
    for key in keys:
        mixed = right + key  # each bit spreads over all, as in the last step of MurmurHash3
        for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
            mixed = (mixed ^ (mixed >> shift)) * np.uint64(factor)
        left, right = right, left ^ ((mixed ^ (mixed >> shift)) & mask)
    return (left << bits) | right


@functools.lru_cache(maxsize=1024)
def _permutations(seed: int, stream: int, rows: int) -> Callable[[int], np.ndarray]:
    """Orders all rows by random numbers, of 8 bytes a row.

    Each stream keeps two epochs, because a batch may span both: other streams push out neither.
    Grain's own `shuffle` takes 25 to 35 us a row, 35 ms for a batch of 1024.
    """

    @functools.lru_cache(maxsize=2)
    def permutation(epoch: int) -> np.ndarray:
        return np.argsort(_numbers(rows, seed, epoch, stream), kind="stable")

    return permutation


def _numbers(count: int, *entropy: int) -> np.ndarray:
    """Draws numbers that numpy promises in every version, unlike `Generator.permutation`."""
    return np.random.PCG64(np.random.SeedSequence(entropy)).random_raw(count)


@dataclasses.dataclass(frozen=True)
class MixtureOrder:
    """Orders the rows of several parts, with a fixed share of each in a block.

    Each part goes through permutations of its own, in which no row is lost or comes twice.
    """

    rows: tuple[int, ...]
    quotas: tuple[int, ...]

    @classmethod
    def of(cls, rows: Sequence[int], rates: Sequence[float]) -> "MixtureOrder":
        """Makes an order from rates, which may have any sum.

        Largest remainders divide a block among the parts, of which each has a place.
        """
        assert len(rows) == len(rates) <= _BLOCK and min(rows) > 0 and min(rates) > 0
        exact = np.array(rates, np.float64) / np.sum(rates, dtype=np.float64) * _BLOCK
        quotas = np.maximum(np.floor(exact), 1)
        while (missing := _BLOCK - quotas.sum()) != 0:
            over = exact - quotas
            at = np.argmax(over) if missing > 0 else np.argmin(np.where(quotas > 1, over, np.inf))
            quotas[at] += np.sign(missing)
        return cls(tuple(rows), tuple(quotas.astype(int).tolist()))

    @property
    def rates(self) -> tuple[float, ...]:
        """Returns the share of rows that each part has."""
        return tuple(quota / _BLOCK for quota in self.quotas)

    def row_ids(self, seed: int, places: np.ndarray) -> np.ndarray:
        """Returns the rows at some places of the endless sequence of the mixture."""
        blocks, within = places // _BLOCK, places % _BLOCK
        # The part of each place, and how many places before it had that part.
        parts, draws = np.empty_like(places), np.empty_like(places)
        for block in np.unique(blocks).tolist():
            now = blocks == block
            order, ranks = _block(self.quotas, seed, block)
            parts[now] = order[within[now]]
            draws[now] = block * np.array(self.quotas)[parts[now]] + ranks[within[now]]
        firsts = np.cumsum(self.rows) - self.rows
        ids = np.empty(len(places), np.int64)
        for part in np.unique(parts).tolist():
            now = parts == part
            ids[now] = firsts[part] + shuffled(seed, draws[now], self.rows[part], part + 1)
        return ids


@functools.lru_cache(maxsize=16)
def _block(quotas: tuple[int, ...], seed: int, block: int) -> tuple[np.ndarray, np.ndarray]:
    """Orders the places of a block: the part of each, and its rank among those of its part.

    Place j of q comes at a random moment of the j-th of q equal spans, so that short stretches
    have the rates, too.
    """
    parts = np.repeat(np.arange(len(quotas)), quotas)
    ranks = np.concatenate([np.arange(quota) for quota in quotas])
    numbers = _numbers(len(parts), seed, block, len(quotas) + 1) / 2.0**64
    order = np.argsort((ranks + numbers) / np.repeat(quotas, quotas), kind="stable")
    return parts[order], ranks[order]
