"""Rows: counts of the raw text, batches, and where each line went."""

import os
from pathlib import Path

import numpy as np
import pytest

from data.packing.rows import (
    NO_ROW,
    Counts,
    Rows,
    hashed_bytes,
    packed_lines,
    read_word_list,
    with_unk,
)
from data.sources.text import TextFiles
from data.sources.text_files import read_lines, read_raw_lines
from data.tokenizers.sentence_piece import SentencePiece
from data.vocab import make

SHARED = Path(os.environ.get("MESHLOOM_SHARED_DATA", Path(__file__).parents[4] / "shared" / "data"))
LINES = ["one two three", "", " four  five ", "naïve six seven eight nine ten " * 4]


def rows_of(lines, vocab, length, words=None):
    packed, counts = packed_lines(lines, vocab, length, words, packs=True)
    return Rows(packed.arrays, counts, packed.pieces, begin_id=vocab.begin_id)


@pytest.fixture(scope="module")
def vocab():
    return make(SentencePiece(size=300), iter(LINES * 20))


def test_counts_are_of_the_raw_text(vocab):
    rows = rows_of(LINES, vocab, 16)
    assert rows.counts.lines == 4
    assert rows.counts.words == 3 + 0 + 2 + 24
    assert rows.counts.words + rows.counts.lines == 33
    assert rows.counts.bytes == len(("\n".join(LINES) + "\n").encode())
    assert rows.counts.tokens == sum(len(ids) + 1 for ids in vocab.encode(LINES))
    assert rows.counts.tokens == (rows.segments_BL > 0).sum()
    assert rows.counts.rows == len(rows)


def test_bytes_are_those_of_the_file_and_carriage_returns_are_no_text(vocab, tmp_path):
    (tmp_path / "unix").write_bytes(b"one two\nthree\n")
    (tmp_path / "windows").write_bytes(b"one two\r\nthree\r\n")
    unix, windows = (
        rows_of(read_raw_lines(str(tmp_path / name)), vocab, 16) for name in ("unix", "windows")
    )
    assert (unix.counts.bytes, windows.counts.bytes) == (14, 16)
    assert (unix.targets_BL == windows.targets_BL).all()
    assert unix.counts.words == windows.counts.words


def test_newlines_inside_an_example_change_its_hash():
    assert hashed_bytes("a") + hashed_bytes("b\r") == b"a\nb\r\n"
    for two in ("ab", ("a", "\ufeffb")):
        assert hashed_bytes("a\nb") != b"".join(map(hashed_bytes, two))


def test_pieces_lead_from_each_line_to_its_tokens(vocab):
    rows = rows_of(LINES, vocab, 16)
    for number, line in enumerate(LINES):
        pieces = rows.pieces[rows.pieces[:, 0] == number]
        ids = [rows.targets_BL[r][rows.segments_BL[r] == s] for _, r, s in pieces]
        assert vocab.decode(np.concatenate(ids)) == line


def test_a_batch_has_four_int32_arrays_and_empty_rows_where_asked(vocab):
    rows = rows_of(LINES, vocab, 16)
    batch = rows.batch(np.array([1, NO_ROW, 0]))
    assert {name: (a.dtype, a.shape) for name, a in batch.items()} == {
        name: (np.dtype(np.int32), (3, 16))
        for name in ("inputs_BL", "targets_BL", "segments_BL", "positions_BL")
    }
    assert not any(array[1].any() for array in batch.values())
    assert (batch["targets_BL"][[0, 2]] == rows.targets_BL[[1, 0]]).all()
    assert rows.targets_BL[0].any(), "an empty row must not empty row 0 itself"


def test_no_lines_make_no_rows(vocab):
    rows = rows_of([], vocab, 16)
    assert (len(rows), rows.counts) == (0, Counts())


def test_word_list_changes_words_but_not_their_count(vocab, tmp_path):
    path = tmp_path / "words"
    path.write_text("one 7\nthree 3\n\n")
    word_list = read_word_list(str(path))
    assert with_unk(LINES[:3], word_list) == ["one <UNK> three", "", " <UNK>  <UNK> "]
    assert read_word_list(None) is None
    plain, listed = (rows_of(LINES, vocab, 16, w) for w in (None, word_list))
    assert plain.counts.words == listed.counts.words
    assert plain.counts.bytes == listed.counts.bytes
    assert plain.counts.tokens != listed.counts.tokens


def test_lm1b_held_out_shard_has_159658_words_with_ends_of_lines():
    path = SHARED / "lm1b_heldout" / "news.en.heldout-00000-of-00050.gz"
    if not path.exists():
        pytest.skip(
            f"{path} is not here; set MESHLOOM_SHARED_DATA to the folder above lm1b_heldout"
        )
    counts = Counts.of(list(read_lines(str(path))))
    assert (counts.words, counts.lines) == (153_583, 6_075)


def test_wikitext_2_has_245569_words_with_ends_of_lines():
    """Merity et al. 2016, table 1: 245,569 tokens of test text, an <eos> on each line."""
    path = SHARED / "wikitext-2" / "test.txt.gz"
    if not path.exists():
        pytest.skip(f"{path} is not here; set MESHLOOM_SHARED_DATA to the folder above wikitext-2")
    source = TextFiles(train="none", test=str(path), example="any line")
    counts = Counts.of(list(source.lines("test")))
    assert (counts.words, counts.lines) == (241_211, 4_358)
    assert counts == Counts.of(list(read_lines(str(path))))
    assert counts.words + counts.lines == 245_569


def test_blank_lines_are_examples_where_every_line_is_one(vocab, tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(" = Title = \n \n\n words in a line \n")
    counts = {
        kind: rows_of(TextFiles(train="none", test=str(path), example=kind).lines("test"),
                              vocab, 16).counts
        for kind in ("line", "any line")
    }  # fmt: skip
    of_file = rows_of(read_lines(str(path)), vocab, 16).counts
    assert [(c.words, c.lines) for c in counts.values()] == [(7, 2), (7, 4)]
    assert counts["any line"] == of_file and of_file.bytes == path.stat().st_size
