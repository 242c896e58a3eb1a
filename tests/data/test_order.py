"""The order: every epoch a permutation, every host its part, every step the same again."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.batch_sizes import BatchSizes
from data.mixture import MixtureOrder
from data.order import batches, in_order
from data.packing.rows import NO_ROW, Counts, Rows
from tests.toys import row_ids


@pytest.fixture(scope="module")
def rows():
    targets_BL = np.arange(1, 23 * 6 + 1, dtype=np.uint16).reshape(23, 6)
    arrays = {"targets": targets_BL, "segments": np.ones((23, 6), np.uint16)}
    return Rows(arrays, Counts(tokens=23 * 6, rows=23))


@given(st.integers(0, 2**32), st.integers(1, 40), st.integers(1, 50))
@settings(deadline=None, max_examples=60)
def test_each_epoch_is_a_permutation_even_where_batches_span_epochs(seed, batch, count):
    steps = -(-3 * count // batch)
    ids = np.concatenate([row_ids(seed, step, batch, count) for step in range(steps)])
    for epoch in range(3):
        assert sorted(ids[epoch * count : (epoch + 1) * count]) == list(range(count))


def test_each_epoch_and_seed_has_another_order():
    epochs = [tuple(row_ids(seed, step, 50, 50)) for seed in range(4) for step in range(4)]
    assert len(set(epochs)) == 16


def test_the_order_never_changes_between_versions():
    assert list(row_ids(7, 2, 5, 11)) == [1, 1, 3, 2, 10]


def test_batches_are_the_rows_of_row_ids(rows):
    for step, (ids, batch) in enumerate(itertools.islice(batches(rows, 3, BatchSizes(4), 0), 12)):
        assert list(ids) == list(row_ids(3, step, 4, 23))
        assert (batch["targets_BL"] == rows.targets_BL[ids]).all()


def test_resuming_is_continuing(rows):
    whole = itertools.islice(batches(rows, 3, BatchSizes(4), 0), 20)
    resumed = itertools.islice(batches(rows, 3, BatchSizes(4), 11), 9)
    for (ids, batch), (ids_again, batch_again) in zip(list(whole)[11:], resumed, strict=True):
        assert list(ids) == list(ids_again)
        assert (batch["targets_BL"] == batch_again["targets_BL"]).all()


def test_rows_that_are_cut_keep_their_order_on_any_hosts():
    """Each part of a row is a row of its own, with segments of its own."""
    rng = np.random.default_rng(0)
    segments_BL = np.cumsum(rng.random((23, 12)) < 0.3, axis=1) + 1
    segments_BL[:, 10:] = 0
    targets_BL = rng.integers(1, 99, (23, 12)) * (segments_BL > 0)
    rows = Rows({"targets": targets_BL, "segments": segments_BL}, Counts(), begin_id=7)
    short = Rows(
        {"targets": targets_BL.reshape(-1, 4), "segments": segments_BL.reshape(-1, 4)}, Counts(),
        begin_id=7,
    )  # fmt: skip
    cut = dataclasses.replace(rows, batch_length=4)
    for step, (ids, batch) in enumerate(itertools.islice(batches(cut, 3, BatchSizes(6), 0), 9)):
        np.testing.assert_array_equal(ids, row_ids(3, step, 6, 23))
        expected = short.batch((ids[:, None] * 3 + np.arange(3)).reshape(-1))
        for name, array in expected.items():
            np.testing.assert_array_equal(batch[name], array)
        spans = (0, 5), (5, 13), (13, 18)  # of parts, in the middle of rows
        hosts = [next(batches(cut, 3, BatchSizes(6), step, span))[1] for span in spans]
        for name, array in batch.items():
            np.testing.assert_array_equal(np.concatenate([host[name] for host in hosts]), array)


@pytest.mark.parametrize("hosts", [2, 3, 6])
def test_slices_of_hosts_make_the_global_batch(rows, hosts):
    size = 6 // hosts
    streams = [batches(rows, 0, BatchSizes(6), 2, (h * size, (h + 1) * size)) for h in range(hosts)]
    for (_, batch), *parts in itertools.islice(
        zip(batches(rows, 0, BatchSizes(6), 2), *streams, strict=True), 8
    ):
        for name, array in batch.items():
            assert (np.concatenate([part[name] for _, part in parts]) == array).all()


def test_evaluation_reads_each_row_once_and_fills_up_with_empty_rows(rows):
    read = list(in_order(rows, 5))
    ids = np.concatenate([ids for ids, _ in read])
    assert list(ids) == [*range(23), NO_ROW, NO_ROW]
    assert all(not array[-2:].any() for array in read[-1][1].values())
    tokens = sum((batch["segments_BL"] > 0).sum() for _, batch in read)
    assert tokens == rows.counts.tokens


def test_hosts_and_resumed_runs_read_the_stages_of_a_mixture_alike(rows):
    mix = MixtureOrder.of((20, 3), (1, 0), ((5, (1, 1)), (9, (0, 1))))
    mixed = dataclasses.replace(rows, mix=mix)
    whole = list(itertools.islice(batches(mixed, 3, BatchSizes(4), 0), 14))
    for (ids, _), parts in zip(whole, [{0}] * 5 + [{0, 1}] * 4 + [{1}] * 5, strict=True):
        assert {int(row >= 20) for row in ids} == parts
    for first in (4, 5, 9, 11):
        hosts = [batches(mixed, 3, BatchSizes(4), first, span) for span in ((0, 2), (2, 4))]
        for (ids, batch), *of_hosts in zip(whole[first:], *hosts, strict=False):
            assert all(list(host_ids) == list(ids) for host_ids, _ in of_hosts)
            for name, array in batch.items():
                parts = [part[name] for _, part in of_hosts]
                np.testing.assert_array_equal(np.concatenate(parts), array)
