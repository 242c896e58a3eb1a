"""A task of prompts and answers: from files to cached rows, and the template of both."""

import copy
import dataclasses
import json
import os

import numpy as np
import pytest

from configs.errors import UserError
from data.cache import prepare
from data.packing.rows import NO_ROW, Counts
from data.sources.clean import Clean
from data.sources.json_lines import Jsonl
from data.sources.pair_kinds import Tsv
from data.sources.pairs import Pair
from data.sources.text import Docstrings
from data.task import Task
from data.tasks.prompts import PromptRows, PromptTask, packed_prompts
from data.tokenizers.sentence_piece import SentencePiece
from data.vocab import EOS, PAD, make

RECORDS = [{"q": f"{a} plus {b}", "a": str(a + b)} for a in range(12) for b in range(9)]


@pytest.fixture
def task(tmp_path):
    path = tmp_path / "answers.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    source = Jsonl(
        train=str(path), validation=str(path), test=str(path), source_field="q", target_field="a"
    )
    vocab = SentencePiece(size=40, byte_fallback=False)
    return PromptTask(name="sums", source=source, vocab=vocab, length=20, template="Q {prompt} = ")


def test_cached_rows_are_those_of_the_pairs_in_memory(task, tmp_path):
    prepared = prepare(task, tmp_path / "data")
    cached = prepared.splits["test"]
    lines = [f"{record['q']}\t{record['a']}" for record in RECORDS]
    rows, answers = task.pack_lines(lines, prepared.vocabs, None)
    assert answers == [record["a"] for record in RECORDS]
    batch, expected = (r.batch(np.arange(len(rows))) for r in (cached, rows))
    assert batch.keys() == set(task.array_lengths)
    for name, array in expected.items():
        np.testing.assert_array_equal(batch[name], array)
    assert cached.counts.words == len(RECORDS)
    assert f"{len(RECORDS)} prompts of" in task.summary(cached.counts)


def test_prompts_are_held_out_whatever_their_answers(task, tmp_path):
    """A hash of the answers would hold out all prompts of some, or none."""
    source = dataclasses.replace(task.source, validation=None, validation_fraction=0.2)
    path = tmp_path / "answers.jsonl"
    records = [{"q": record["q"], "a": "yn"[i % 2]} for i, record in enumerate(RECORDS)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records * 2))
    task = dataclasses.replace(task, source=source)
    train, validation = ([*task.pairs_of(source, split)] for split in ("train", "validation"))
    assert {a for _, a in train} == {a for _, a in validation} == {"y", "n"}
    assert not {*train} & {*validation} and len({*train, *validation}) == len(RECORDS)
    assert 0.1 < len(validation) / len(2 * RECORDS) < 0.3
    counts = {name: rows.counts.lines for name, rows in prepare(task, tmp_path).splits.items()}
    assert counts == {"train": len(train), "validation": len(validation), "test": len(RECORDS) * 2}


def test_prompts_with_newlines_of_another_date_share_a_cache(task, tmp_path, log_lines):
    path = tmp_path / "answers.jsonl"
    path.write_text(path.read_text().replace(" plus ", "\\n\\t"))
    folder = prepare(task, tmp_path / "data").folder
    os.utime(path, (1, 1))
    log_lines.clear()
    assert prepare(task, tmp_path / "data").folder == folder
    assert not any("builds" in line for line in log_lines)


def test_a_tab_that_moves_over_the_border_of_a_pair_is_another_text(task, tmp_path, log_lines):
    path = tmp_path / "answers.jsonl"
    for number, record in enumerate(({"q": "a\tb", "a": "c"}, {"q": "a", "a": "b\tc"})):
        path.write_text("".join(json.dumps(r) + "\n" for r in [*RECORDS, record]))
        os.utime(path, (number, number))
        prepare(task, tmp_path / "data")
    assert any("because the text changed" in line for line in log_lines)


@pytest.mark.parametrize("template", ["Q {prompt} = ", "{prompt}\n"])
def test_a_vocab_that_loses_the_newline_of_the_template_is_named(task, template, caplog):
    dataclasses.replace(task, template=template).make_vocabs(None)
    assert ("newlines, which its vocab does not keep" in caplog.text) == ("\n" in template)


def test_the_prompt_stands_in_the_template():
    vocab = SentencePiece()
    source = Jsonl(train="x", source_field="q", target_field="a")
    task = PromptTask(name="t", source=source, vocab=vocab, length=20)
    assert task.prompt("{prompt} {x}") == "{prompt} {x}\n"
    assert not task.has_source
    for template in ("", "{prompt}{prompt}"):
        with pytest.raises(UserError, match=r"template.*Legal: once"):
            PromptTask(name="t", source=source, vocab=vocab, length=20, template=template)
    with pytest.raises(UserError, match=r"Use @Translation\(\) or @PromptTask\(\)"):
        Task(name="t", source=source, vocab=vocab, length=20)
    assert Task(name="t", source=Docstrings(), vocab=vocab, length=20).prompt("a") == "a"


def test_a_vocab_is_trained_on_what_is_not_dropped(tmp_path):
    (tmp_path / "a.tsv").write_bytes(b"one\ttwo\nna\xefve\tthree\n\tfour\n")
    source = Tsv(train=f"{tmp_path}/a.tsv", validation=f"{tmp_path}/a.tsv")
    clean = Clean(drops_invalid_utf8=True)
    task = PromptTask(name="t", source=source, vocab=SentencePiece(), length=20, clean=clean)
    assert list(task.vocab_text("vocab")) == ["one\n", "two"]


def test_a_source_with_tags_is_refused():
    source = Tsv(train="x", tag="de")
    with pytest.raises(UserError, match=r"PromptTask.source: its tags \(de\).*the template sets"):
        PromptTask(name="t", source=source, vocab=SentencePiece(), length=20)


def test_an_answer_keeps_its_newlines_and_tabs(tmp_path):
    path = tmp_path / "answers.jsonl"
    path.write_text(json.dumps({"q": "a list?", "a": "1.\tone\n2.\ttwo"}) + "\n")
    source = Jsonl(train=str(path), validation=str(path), source_field="q", target_field="a")
    task = PromptTask(name="t", source=source, vocab=SentencePiece(size=280), length=70)
    prepared = prepare(task, tmp_path / "data")
    rows = prepared.splits["train"]
    answer = rows.targets_BL[np.array([0])][rows.arrays["loss_mask"][np.array([0])] > 0]
    assert prepared.vocabs.target.decode(answer) == "1.\tone\n2.\ttwo"


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
    assert (batch["segments_BL"] > 0).sum() == counts.tokens + counts.source_tokens


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
