"""Vocabs: what every kind of them does alike."""

import os

import numpy as np
import pytest

from configs.errors import UserError
from data.vocab import Vocab, read_model, thread_count


class Digits(Vocab):
    """Numbers, written as they are."""

    def __init__(self, size=10, **ids):
        super().__init__(b"digits", size, **{"begin_id": 8, "end_id": 9, "pad_id": None, **ids})

    def encode(self, lines):
        return [np.array([*map(int, line)], self.dtype) for line in lines]

    def _text(self, ids):
        return "".join(map(str, ids))

    def pieces(self, ids):
        return [*map(str, ids)]


def test_a_text_ends_at_the_first_end_and_padding_has_no_text():
    assert Digits().decode(np.array([1, 0, 8, 9, 3])) == "108"
    assert Digits(pad_id=0, end_id=3).decode([1, 0, 2, 3, 4]) == "12"


@pytest.mark.parametrize(("size", "dtype"), [(1 << 16, np.uint16), ((1 << 16) + 1, np.uint32)])
def test_the_type_holds_every_id(size, dtype):
    assert Digits(size).dtype is dtype


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(UserError, match=r"vocab .*: cannot be read: Is a directory"):
        read_model(tmp_path)


def test_threads_are_no_more_than_the_cores_of_this_process(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3})
    assert thread_count() == 1
