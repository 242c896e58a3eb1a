"""The decoder: requests in few shapes, and tokens up to the end."""

import numpy as np
import pytest

from configs.errors import RunError
from data.vocab import EOS
from trainer.decoding.decoder import (
    Request,
    TokenHypothesis,
    batches_of,
    padded,
    rows_of,
    shape_of,
    until_end,
    with_finite_score,
)


def test_a_text_without_a_finite_score_ends_the_run() -> None:
    best = TokenHypothesis([5], -1.0, -1.0)
    assert with_finite_score([best]) == [best]
    with pytest.raises(RunError, match="computes NaN or infinity"):
        with_finite_score([])


def test_lengths_are_padded_to_powers_of_two() -> None:
    assert [padded(length) for length in (1, 16, 17, 64, 65)] == [16, 16, 32, 64, 128]
    assert shape_of(Request([], 5)) == (0, 0)
    assert shape_of(Request([7] * 20, 5, source=[7] * 3)) == (16, 32)


def test_a_batch_that_is_not_full_has_the_shortest_texts() -> None:
    requests = [Request([], tokens, source=[7]) for tokens in (3, 9, 5, 20, 7)]
    batches = batches_of(requests, 2, shards=1)
    assert [chosen for chosen, _ in batches] == [[3, 1], [2, 4], [0]]
    assert {shape for _, shape in batches} == {(2, 16, 0, 32)}


def test_few_requests_of_a_length_make_a_small_batch() -> None:
    requests = [Request([], 5)] * 9 + [Request([7] * 20, 5)] * 2
    batches = batches_of(requests, 16, shards=2)
    assert [(len(chosen), shape) for chosen, shape in batches] == [
        (2, (2, 0, 32, 16)),
        (9, (16, 0, 0, 16)),
    ]


def test_a_text_alone_has_as_few_rows_as_the_devices_allow() -> None:
    for shards in (1, 4):
        ((_, shape),) = batches_of([Request([7] * 20, 5)], 64, shards)
        assert shape == (shards, 0, 32, 16)


def test_rows_are_padded_with_zeros() -> None:
    np.testing.assert_array_equal(rows_of([[5, 6], [], [7]], 3), [[5, 6, 0], [0, 0, 0], [7, 0, 0]])


def test_a_text_is_cut_at_its_end() -> None:
    assert until_end(np.array([5, 0, 6, EOS, 0, 0]), [EOS]) == [5, 0, 6]
    assert until_end(np.array([5, EOS, 6, 0]), [6]) == [5, EOS]
    assert until_end(np.array([5, 6, 0]), [EOS]) == [5, 6, 0]  # 0 is a token like any other
    assert until_end(np.array([EOS, 0]), [EOS]) == []
