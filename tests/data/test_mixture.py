"""Mixing: rates kept, no row lost, and each place the same whoever asks."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.batch_sizes import BatchSizes
from data.mixture import MixtureOrder, permuted, shuffled

ROWS = (700, 30, 5, 90)
RATES = (5, 3, 1.5, 0.5)
BLOCK = 4096


@pytest.fixture(scope="module")
def mix():
    return MixtureOrder.of(ROWS, RATES)


def parts_of(ids):
    return np.searchsorted(np.cumsum(ROWS), ids, side="right")


def test_every_block_has_the_rates_exactly(mix):
    ids = mix.rows_of_step(3, 0, BatchSizes(5 * BLOCK))
    for block in parts_of(ids).reshape(5, BLOCK):
        assert tuple(np.bincount(block)) == mix.quotas
    np.testing.assert_allclose(mix.rates_after(0), np.array(RATES) / 10, atol=1 / BLOCK)


def test_short_stretches_have_the_rates_too(mix):
    ids = mix.rows_of_step(3, 0, BatchSizes(5 * BLOCK))
    for batch in parts_of(ids).reshape(-1, 64):
        counts = np.bincount(batch, minlength=4)
        assert (abs(counts - 64 * np.array(mix.rates_after(0))) < 2.5).all()


def test_no_row_of_a_part_is_lost_or_comes_twice_in_its_epoch(mix):
    ids = mix.rows_of_step(3, 0, BatchSizes(5 * BLOCK))
    for part, (first, rows) in enumerate(zip(np.cumsum(ROWS) - ROWS, ROWS, strict=True)):
        part_ids = ids[parts_of(ids) == part]
        epochs = part_ids[: len(part_ids) // rows * rows].reshape(-1, rows)
        assert len(epochs) > 10
        assert (np.sort(epochs, axis=1) == np.arange(first, first + rows)).all()
        assert len(set(map(tuple, epochs))) > 0.9 * len(epochs) or rows < 6


@given(st.integers(0, 9), st.integers(0, 40), st.integers(1, 300))
@settings(deadline=None, max_examples=30)
def test_any_batch_is_part_of_the_same_sequence(seed, step, count):
    mix = MixtureOrder.of(ROWS, RATES)
    whole = mix.rows_of_step(seed, 0, BatchSizes(3 * BLOCK + 300))
    batch = mix.rows_of_step(seed, step, BatchSizes(count))
    np.testing.assert_array_equal(batch, whole[step * count : (step + 1) * count])


def test_each_seed_has_another_order(mix):
    orders = {tuple(mix.rows_of_step(seed, 0, BatchSizes(200))) for seed in range(8)}
    assert len(orders) == 8


def test_parts_of_one_size_have_different_orders():
    mix = MixtureOrder.of((50, 50), (1, 1))
    ids = mix.rows_of_step(0, 0, BatchSizes(100))
    assert list(ids[ids < 50]) != list(ids[ids >= 50] - 50)


def test_a_part_of_hardly_any_rate_still_comes():
    mix = MixtureOrder.of((10, 10, 10), (1, 1e-9, 1e-9))
    assert mix.quotas == (BLOCK - 2, 1, 1)


@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=90))
@settings(deadline=None, max_examples=60)
def test_quotas_fill_a_block_and_lie_within_one_place_of_their_rates(rates):
    quotas = np.array(MixtureOrder.of([1] * len(rates), rates).quotas)
    assert quotas.sum() == BLOCK and quotas.min() >= 1
    expected = np.array(rates) / sum(rates) * BLOCK
    assert (abs(quotas - expected)[expected >= 1] < 1 + (expected < 1).sum()).all()


def test_the_order_never_changes_between_versions(mix):
    assert list(shuffled(7, np.arange(10, 15), 11)) == [1, 1, 3, 2, 10]
    ids = mix.rows_of_step(7, 0, BatchSizes(4102))
    assert list(ids[4094:]) == [712, 62, 47, 722, 592, 304, 731, 727]


KEYS = np.arange(1, 9, dtype=np.uint64) << np.uint64(40)


@pytest.mark.parametrize("rows", [1, 2, 3, 11, 64, 65, 1000, 4097])
def test_a_computed_permutation_has_each_row_once(rows):
    orders = [permuted(np.arange(rows), rows, KEYS + np.uint64(n)) for n in range(6)]
    assert all(sorted(order) == list(range(rows)) for order in orders)
    assert len(set(map(tuple, orders))) == 6 or rows < 6


def test_a_computed_permutation_leaves_nothing_of_the_order():
    """Neighbours, places and their lowest bits are as independent as in a random permutation."""
    rows = 9_000
    order = permuted(np.arange(rows), rows, KEYS).astype(float)
    for other in (np.arange(rows), np.roll(order, 1), np.roll(order, 64), order % 2):
        assert abs(np.corrcoef(order, other)[0, 1]) < 4 / rows**0.5
    counts = np.histogram2d(order, np.arange(rows), bins=15)[0]
    chi_square = ((counts - rows / 225) ** 2 / (rows / 225)).sum()
    assert abs(chi_square - 14**2) < 5 * (2 * 14**2) ** 0.5


def test_a_billion_rows_are_ordered_without_a_table():
    rows, places = 10**9, np.arange(10**9 - 3000, 10**9 + 3000)
    tracemalloc.start()
    ids = shuffled(7, places, rows)
    assert tracemalloc.get_traced_memory()[1] < 2e6
    tracemalloc.stop()
    assert len(set(ids[:3000])) == len(set(ids[3000:])) == 3000
    assert 0 <= ids.min() < 10**6 and 10**9 - 10**6 < ids.max() < 10**9
    assert list(ids[:3]) == [257712943, 939848169, 426647641]  # never changes between versions


STAGES = ((10, (0, 1, 0, 1)), (13, (1, 0, 0, 0)), (40, (1, 1, 1, 1)))


def test_a_stage_changes_nothing_before_it(mix):
    staged = MixtureOrder.of(ROWS, RATES, STAGES)
    for batch in (7, 900):
        before = [staged.rows_of_step(3, step, BatchSizes(batch)) for step in range(10)]
        np.testing.assert_array_equal(
            np.concatenate(before), mix.rows_of_step(3, 0, BatchSizes(10 * batch))
        )
        for later in STAGES[1:]:  # nor does one that is added
            fewer = MixtureOrder.of(ROWS, RATES, [s for s in STAGES if s[0] < later[0]])
            ids = fewer.rows_of_step(3, later[0] - 1, BatchSizes(batch))
            assert list(ids) == list(staged.rows_of_step(3, later[0] - 1, BatchSizes(batch)))
            assert list(ids) != list(staged.rows_of_step(3, later[0], BatchSizes(batch)))


@given(st.integers(0, 9), st.integers(1, 600), st.integers(1, 30), st.integers(1, 30))
@settings(deadline=None, max_examples=30)
def test_a_part_goes_on_in_a_stage_where_it_was(seed, batch, first, more):
    """Of the mixture or of the batch."""
    stages = ((first, (0, 1, 0, 1)), (first + more, (1, 1, 0, 1)))
    staged = MixtureOrder.of(ROWS, RATES, stages)
    sizes = BatchSizes(batch, ((more, batch + 9), (first + more, 3)))
    ids = np.concatenate([staged.rows_of_step(seed, s, sizes) for s in range(first + more + 9)])
    for part, (start, rows) in enumerate(zip(np.cumsum(ROWS) - ROWS, ROWS, strict=True)):
        part_ids = ids[parts_of(ids) == part]
        whole = start + shuffled(seed, np.arange(len(part_ids)), rows, part + 1)
        np.testing.assert_array_equal(part_ids, whole)


def test_a_stage_has_its_rates_and_a_rate_of_0_no_row():
    staged = MixtureOrder.of(ROWS, RATES, STAGES)
    for step in (10, 12):
        counts = np.bincount(parts_of(staged.rows_of_step(3, step, BatchSizes(64))), minlength=4)
        assert counts[0] == counts[2] == 0 and abs(counts[1] - 32) < 3
    assert set(parts_of(staged.rows_of_step(3, 39, BatchSizes(64)))) == {0}
    assert staged.rates_after(12) == (0, 0.5, 0, 0.5) and staged.rates_after(13) == (1, 0, 0, 0)
    read = np.bincount(
        parts_of(
            np.concatenate([staged.rows_of_step(3, step, BatchSizes(64)) for step in range(50)])
        )
    )
    assert staged.drawn_before(3, 50, BatchSizes(64)).tolist() == read.tolist()


def test_a_part_that_a_stage_adds_changes_no_step_before_it():
    """Nor where the parts that were there go on."""
    sizes, added = BatchSizes(700, ((4, 3),)), (13, (1, 0, 1, 0, 9))
    before = MixtureOrder.of(ROWS, RATES, STAGES[:1])
    after = MixtureOrder.of((*ROWS, 50), RATES, (*STAGES[:1], added))
    for step in range(13):
        ids = before.rows_of_step(3, step, sizes)
        np.testing.assert_array_equal(after.rows_of_step(3, step, sizes), ids)
    drawn = before.drawn_before(3, 13, sizes)
    assert after.drawn_before(3, 13, sizes).tolist() == [*drawn, 0]
    ids = np.concatenate([after.rows_of_step(3, step, sizes) for step in range(13, 900)])
    assert set(ids) >= set(range(825, 875)) and not {1, 3} & set(parts_of(ids))
    firsts = ids[ids < 700]
    places = np.arange(len(firsts)) + drawn[0]
    np.testing.assert_array_equal(firsts, shuffled(3, places, 700, 1))


def test_the_order_of_stages_never_changes_between_versions():
    staged = MixtureOrder.of(ROWS, RATES, STAGES)
    assert list(staged.rows_of_step(7, 12, BatchSizes(5))) == [741, 715, 821, 705, 813]
