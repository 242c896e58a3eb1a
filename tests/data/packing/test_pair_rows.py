"""Rows of pairs: counts of both sides, batches, and where each pair went."""

import numpy as np
import pytest

from data.packing.rows import NO_ROW, Counts, PairRows, packed_pairs
from data.sources.pairs import Pair
from data.tokenizers.sentence_piece import SentencePiece
from data.vocab import EOS, make
from data.vocabs import Vocabs

PAIRS = [
    Pair("ein zwei drei", "one two"),
    Pair("", "nothing at all"),
    Pair("vier " * 30, "four"),
    Pair(" fünf  sechs ", "five six seven"),
]
KEPT = [0, 1, 3]


@pytest.fixture(scope="module")
def vocabs():
    return [make(SentencePiece(size=size), (pair[i] for pair in PAIRS * 9))
            for i, size in ((0, 280), (1, 285))]  # fmt: skip


def rows_of(pairs, vocabs, packs=True):
    packed, counts = packed_pairs(pairs, Vocabs(*vocabs[::-1]), (20, 30), packs, None)
    return PairRows(packed.arrays, counts, packed.pieces)


@pytest.fixture(scope="module")
def rows(vocabs):
    return rows_of(PAIRS, vocabs)


def test_counts_are_of_the_pairs_that_fit(rows, vocabs):
    kept = [PAIRS[i] for i in KEPT]
    assert rows.counts == Counts(
        lines=3,
        words=2 + 3 + 3,
        bytes=sum(len(pair.target.encode()) + 1 for pair in kept),
        tokens=sum(len(ids) + 1 for ids in vocabs[1].encode([pair.target for pair in kept])),
        rows=len(rows),
        source_words=3 + 0 + 2,
        source_bytes=sum(len(pair.source.encode()) + 1 for pair in kept),
        source_tokens=sum(len(ids) + 1 for ids in vocabs[0].encode([p.source for p in kept])),
        left_out=1,
    )
    assert rows.counts.tokens == (rows.segments_BL > 0).sum()
    assert rows.counts.source_tokens == (rows.arrays["source_segments"] > 0).sum()
    assert (rows.targets_BL.shape[1], rows.arrays["sources"].shape[1]) == (20, 30)


def test_pieces_lead_from_each_pair_to_its_tokens_on_both_sides(rows, vocabs):
    assert sorted(rows.pieces[:, 0]) == KEPT
    for number, row, segment in rows.pieces:
        source = rows.arrays["sources"][row][rows.arrays["source_segments"][row] == segment]
        target = rows.targets_BL[row][rows.segments_BL[row] == segment]
        assert source[-1] == target[-1] == EOS
        assert (vocabs[0].decode(source), vocabs[1].decode(target)) == PAIRS[number]


def test_a_batch_has_seven_int32_arrays_and_empty_rows_where_asked(rows):
    batch = rows.batch(np.array([0, NO_ROW]))
    lengths = {name: array.shape[1] for name, array in batch.items()}
    assert lengths == {
        **dict.fromkeys(("inputs_BM", "segments_BM", "positions_BM"), 30),
        **dict.fromkeys(("inputs_BL", "targets_BL", "segments_BL", "positions_BL"), 20),
    }
    assert {array.dtype for array in batch.values()} == {np.dtype(np.int32)}
    assert not any(array[1].any() for array in batch.values())
    np.testing.assert_array_equal(batch["inputs_BM"][0], rows.arrays["sources"][0])
    np.testing.assert_array_equal(batch["targets_BL"][0], rows.targets_BL[0])


def test_inputs_and_positions_restart_with_each_pair_on_both_sides(rows):
    batch = rows.batch(np.arange(len(rows)))
    for _, row, segment in rows.pieces:
        target = batch["segments_BL"][row] == segment
        source = batch["segments_BM"][row] == segment
        assert list(batch["positions_BL"][row][target]) == list(range(target.sum()))
        assert list(batch["positions_BM"][row][source]) == list(range(source.sum()))
        shifted = [0, *batch["targets_BL"][row][target][:-1]]
        assert list(batch["inputs_BL"][row][target]) == shifted


def test_without_packing_each_pair_has_a_row(vocabs):
    rows = rows_of(PAIRS, vocabs, packs=False)
    assert rows.pieces.tolist() == [[number, row, 1] for row, number in enumerate(KEPT)]


def test_a_tag_is_in_front_of_each_source_and_no_word_of_the_text():
    vocab = make(SentencePiece(size=280), (p.source for p in PAIRS * 9), words=["<2en>"])
    tagged, plain = (
        packed_pairs([PAIRS[0], PAIRS[3]], Vocabs(vocab, vocab), (30, 40), True, tag)
        for tag in ("2en", None)
    )
    [tag_id] = vocab.encode(["<2en>"])[0]
    firsts = tagged[0].arrays["sources"][:, 0]
    assert (firsts == tag_id).all() and len(firsts)
    assert tagged[1].source_words == plain[1].source_words
    assert tagged[1].source_tokens == plain[1].source_tokens + 2


def test_no_pairs_make_no_rows(vocabs):
    rows = rows_of([], vocabs)
    assert (len(rows), rows.counts) == (0, Counts())
