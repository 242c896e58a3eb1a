"""Rows of prompts and answers: what is read, and which targets count."""

import copy

import numpy as np
import pytest

from data.packing.prompt_rows import PromptRows, packed_prompts
from data.packing.rows import NO_ROW, Counts
from data.sources.pairs import Pair
from data.tokenizers.sentence_piece import SentencePiece
from data.vocab import EOS, PAD, make

PAIRS = [
    Pair("one two three", "four five"),
    Pair("one " * 30, "two"),
    Pair("", "one"),
    Pair("two two", ""),
]
KEPT = [0, 2, 3]
LENGTH = 12


@pytest.fixture(scope="module")
def vocab():
    text = [*(pair.source for pair in PAIRS), *(pair.target for pair in PAIRS)]
    return make(SentencePiece(size=30, byte_fallback=False), iter(text * 9))


def test_the_answers_and_their_ends_count_and_nothing_else(vocab):
    (arrays, pieces), counts = packed_prompts(PAIRS, vocab, LENGTH, packs=True)
    rows = PromptRows(arrays, counts, pieces, begin_id=PAD)
    batch = rows.batch(np.array([*range(len(rows)), NO_ROW]))
    for pair, row, segment in pieces:
        prompt, answer = vocab.encode(PAIRS[pair])
        here = batch["segments_BL"][row] == segment
        whole = [*prompt, *answer, EOS]
        assert list(batch["targets_BL"][row][here]) == whole
        assert list(batch["inputs_BL"][row][here]) == [PAD, *whole[:-1]]
        mask = [0] * len(prompt) + [1] * (len(answer) + 1)
        assert list(batch["loss_mask_BL"][row][here]) == mask
    assert sorted(pieces[:, 0]) == KEPT
    assert batch["loss_mask_BL"].sum() == counts.tokens
    assert not batch["loss_mask_BL"][batch["segments_BL"] == 0].any()
    assert not batch["loss_mask_BL"][-1].any()
    assert rows.fill == (batch["segments_BL"] > 0).sum() / (LENGTH * len(rows))


def test_a_prompt_without_a_beginning_is_read_from_its_first_token(vocab):
    vocab = copy.copy(vocab)
    vocab.reads_begin = False
    (arrays, pieces), counts = packed_prompts(PAIRS, vocab, LENGTH, packs=True)
    rows = PromptRows(arrays, counts, pieces, begin_id=EOS, reads_begin=False)
    batch = rows.batch(np.array([*range(len(rows)), NO_ROW]))
    for pair, row, segment in pieces:
        prompt, answer = vocab.encode(PAIRS[pair])
        here = batch["segments_BL"][row] == segment
        whole = [*prompt, *answer, EOS]
        assert list(batch["inputs_BL"][row][here]) == whole
        assert list(batch["targets_BL"][row][here]) == [*whole[1:], 0]
        counted = batch["targets_BL"][row][here & (batch["loss_mask_BL"][row] > 0)]
        assert list(counted) == [*answer, EOS][len(prompt) == 0 :]
        assert list(batch["positions_BL"][row][here]) == [*range(len(whole))]
    assert batch["loss_mask_BL"].sum() == counts.tokens
    assert not batch["loss_mask_BL"][batch["segments_BL"] == 0].any()


def test_words_are_those_of_the_answers(vocab):
    _, counts = packed_prompts(PAIRS, vocab, LENGTH, packs=False)
    assert (counts.lines, counts.words, counts.rows) == (3, 3, 3)
    assert (counts.source_words, counts.left_out) == (5, 1)
    assert packed_prompts(PAIRS[1:2], vocab, LENGTH, packs=True)[1] == Counts(left_out=1)
