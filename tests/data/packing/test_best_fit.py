"""Best fit of pairs: both halves stay together, and no pair is lost but those that do not fit."""

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.packing import pack
from data.packing.best_fit import BestFit
from data.vocab import EOS
from tests.data.packing.packer import pack_at_once

halves = st.lists(st.integers(2, 60_000), max_size=20).map(lambda x: np.array(x, np.uint16))
pairs_of = st.lists(st.tuples(halves, halves), max_size=60)


def pack_pairs(sources, targets, source_length, length, *, packs=True):
    return pack_at_once(targets, length, sources, source_length, packs=packs)


def unpack_pairs(packed):
    """The packed pairs by their numbers, each half with its EOS."""
    return {
        pair: (
            packed.arrays["sources"][row][packed.arrays["source_segments"][row] == segment],
            packed.arrays["targets"][row][packed.arrays["segments"][row] == segment],
        )
        for pair, row, segment in packed.pieces.tolist()
    }


def sides(pairs):
    return [source for source, _ in pairs], [target for _, target in pairs]


@given(pairs_of, st.integers(2, 17), st.integers(2, 17), st.booleans())
@settings(deadline=None, max_examples=150)
def test_unpacking_gives_each_pair_back(pairs, source_length, length, packs):
    packed = pack_pairs(*sides(pairs), source_length, length, packs=packs)
    actual = unpack_pairs(packed)
    for number, (source, target) in enumerate(pairs):
        if len(source) < source_length and len(target) < length:
            halves = [list(half) for half in actual.pop(number)]
            assert halves == [[*source, EOS], [*target, EOS]]
    assert not actual
    assert not packed.arrays["targets"][packed.arrays["segments"] == 0].any()
    assert not packed.arrays["sources"][packed.arrays["source_segments"] == 0].any()
    if not packs:
        assert packed.arrays["segments"].max(initial=0) <= 1


@given(pairs_of, st.integers(2, 17), st.integers(2, 17))
@settings(deadline=None, max_examples=100)
def test_both_sides_of_a_row_hold_the_same_segments_in_the_same_order(pairs, source_length, length):
    packed = pack_pairs(*sides(pairs), source_length, length)
    for segments, source_segments in zip(
        packed.arrays["segments"], packed.arrays["source_segments"], strict=True
    ):
        for side in (segments, source_segments):
            filled = side[side > 0]
            assert list(filled) == sorted(filled) and (side[: len(filled)] > 0).all()
        assert set(segments) - {0} == set(source_segments) - {0} == set(range(1, max(segments) + 1))


def random_pairs(count, longest=30):
    """Pairs of about equal halves, as translations are."""
    random = np.random.default_rng(0)
    sizes = random.integers(1, longest, count)
    others = np.clip(sizes + random.integers(-3, 4, count), 1, longest)
    both = np.stack([sizes, others], axis=1).tolist()
    return [(np.full(a, 5, np.uint16), np.full(b, 6, np.uint16)) for a, b in both]


def test_rows_are_well_filled():
    packed = pack_pairs(*sides(random_pairs(9000)), 128, 128)
    assert (packed.arrays["segments"] > 0).mean() > 0.97
    assert (packed.arrays["source_segments"] > 0).mean() > 0.97


def test_chunks_do_not_change_what_is_in_the_rows():
    sources, targets = sides(random_pairs(3000))
    packer = pack.Packer(pack.Side(48), pack.Side(32))
    for i in range(0, 3000, 700):
        packer.add(targets[i : i + 700], sources[i : i + 700])
    chunked = packer.finish()
    whole = pack_pairs(sources, targets, 32, 48)
    assert pairs_by_row(chunked) == pairs_by_row(whole)


def pairs_by_row(packed):
    rows = [packed.pieces[packed.pieces[:, 1] == row] for row in range(packed.rows)]
    return sorted([(pair, segment) for pair, _, segment in row.tolist()] for row in rows)


def test_open_rows_are_bounded():
    packer = pack.Packer(pack.Side(100), pack.Side(100))
    halves = [np.full(59, 5, np.uint16)] * 2000
    packer.add(halves, halves)
    assert len(packer._fit.open_rows()) == pack.OPEN_ROWS


def test_a_pair_goes_to_the_fullest_row_that_has_room_on_both_sides():
    """Rows 0 to 2 are left with room for (1, 6), (6, 7) and (7, 1) tokens."""
    sizes = [(9, 4), (4, 3), (3, 9), (2, 6)]
    sources, targets = ([np.full(size[i] - 1, 7, np.uint16) for size in sizes] for i in (0, 1))
    packed = pack_pairs(sources, targets, 10, 10)
    assert sorted(packed.pieces.tolist()) == [[0, 0, 1], [1, 1, 1], [2, 2, 1], [3, 1, 2]]


@pytest.mark.parametrize("side", [0, 1])
def test_a_pair_with_one_long_half_is_left_out_and_counted_in_the_numbers(side):
    long = [np.full(9, 5, np.uint16), np.full(2, 5, np.uint16)]
    short = np.full(2, 6, np.uint16)
    halves = [[short, long[side], short], [short, long[1 - side], short]]
    packed = pack_pairs(*halves, 8, 8)
    assert sorted(unpack_pairs(packed)) == [0, 2]


def test_unpacking_would_see_halves_that_changed_places():
    """What the law of the inverse compares tells two pairs of one row apart."""
    pairs = [(np.array([5], np.uint16), np.array([6], np.uint16)),
             (np.array([7], np.uint16), np.array([8], np.uint16))]  # fmt: skip
    packed = pack_pairs(*sides(pairs), 9, 9)
    swapped = np.array([0, 2, 1], np.uint16)[packed.arrays["source_segments"]]
    actual = unpack_pairs(packed._replace(arrays={**packed.arrays, "source_segments": swapped}))
    assert [source.tolist() for source, _ in actual.values()] == [[7, EOS], [5, EOS]]


@pytest.mark.parametrize(("sides", "digest"), [(1, "7084bf8e"), (2, "68a2077e")])
def test_rows_are_the_same_in_every_version(sides, digest):
    """A cache that is built again, elsewhere or later, gives a resumed run the same rows."""
    sizes = np.random.PCG64(0).random_raw(600).reshape(-1, 2) % 17 + 1
    fit = BestFit([20, 18][:sides], limit=7)
    places = np.concatenate([part.ravel() for part in fit.put(sizes[:, :sides])])
    assert hashlib.sha256(places.astype(np.int64).tobytes()).hexdigest()[:8] == digest
