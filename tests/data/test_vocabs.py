"""Vocabs: one for both sides or one for each, given or trained, and every tag one sub-word."""

import itertools
import random

import pytest

from configs.errors import UserError
from data.sources.clean import Clean
from data.sources.pair_kinds import Mixture, Tsv
from data.tasks.translation import Translation
from data.tokenizers.sentence_piece import SentencePiece
from data.vocab import make
from data.vocabs import Vocabs
from tests.data.conftest import kept_log_lines

SYLLABLES = [a + b for a, b in itertools.product("bdgklmnprst", "aeiou")]


def words(count, letters):
    chosen = random.Random(0)
    return [" ".join("".join(chosen.choices(letters, k=2)) for _ in range(6)) for _ in range(count)]


SOURCES, TARGETS = words(300, SYLLABLES[:25]), words(300, SYLLABLES[30:])


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "pairs.tsv"
    lines = zip(SOURCES, TARGETS, strict=True)
    path.write_text("".join(f"{source}\t{target}\n" for source, target in lines))
    return Tsv(train=str(path), validation=str(path))


def task_of(source, *, source_size=None, **changes):
    source_vocab = None if source_size is None else SentencePiece(size=source_size)
    return Translation(
        name="x", source=source, vocab=SentencePiece(size=320), length=30, source_length=30,
        source_vocab=source_vocab, **changes,
    )  # fmt: skip


def made(task, given=None):
    with kept_log_lines() as lines:
        return task.make_vocabs(given), lines


def test_a_joint_vocab_is_trained_on_both_sides(source):
    vocabs, lines = made(task_of(source))
    assert vocabs.source is vocabs.target
    assert lines == ["x: vocab of 320 tokens"]
    lengths = [len(ids) for ids in vocabs.target.encode([SOURCES[0], TARGETS[0]])]
    assert max(lengths) < 0.8 * len(SOURCES[0])  # characters: both sides have sub-words


def test_separate_vocabs_are_trained_on_a_side_each(source):
    vocabs, lines = made(task_of(source, source_size=310))
    assert (vocabs.source.size, vocabs.target.size) == (310, 320)
    assert lines == ["x: source vocab of 310 tokens", "x: target vocab of 320 tokens"]
    by_source_vocab, other = (
        len(vocabs.source.encode([side[0]])[0]) for side in (SOURCES, TARGETS)
    )
    assert by_source_vocab < other / 1.5


def test_given_vocabs_are_taken(source):
    given, other = (make(SentencePiece(size=n), iter(SOURCES + TARGETS)) for n in (300, 305))
    assert made(task_of(source), Vocabs(given, given)) == (Vocabs(given, given), [])
    separate = task_of(source, source_size=310)
    assert made(separate, Vocabs(given, other)) == (Vocabs(given, other), [])


def test_dropped_pairs_train_no_vocab(source):
    with pytest.raises(UserError, match="no text to train on"):
        made(task_of(source, clean=Clean(max_characters=5)))


def test_saved_vocabs_come_back(source, tmp_path):
    for size, files in ((None, ["vocab.model"]), (310, ["source_vocab.model", "vocab.model"])):
        task, folder = task_of(source, source_size=size), tmp_path / str(size)
        folder.mkdir()
        vocabs, _ = made(task)
        vocabs.save(folder)
        assert sorted(path.name for path in folder.iterdir()) == files
        assert Vocabs.load(folder, task.source_vocab_file).hashes() == vocabs.hashes()


def test_every_tag_is_one_subword_of_the_source_vocab(source):
    parts = [Tsv(train=source.train, tag=tag) for tag in ("2de", "<2fr>", ">>it,a<<", "[nl]")]
    for size in (None, 310):
        vocabs, _ = made(task_of(Mixture(parts=parts), source_size=size))
        for tag in ("<2de>", "<2fr>", ">>it,a<<", "[nl]"):
            [line, alone] = vocabs.source.encode([f"{tag} {SOURCES[0]}", tag])
            assert len(alone) == 1 and line[0] == alone[0]
            assert vocabs.source.decode(line) == f"{tag} {SOURCES[0]}"


def test_a_vocab_without_the_tags_is_refused(source):
    given = make(SentencePiece(size=300), iter(SOURCES + TARGETS))
    task = task_of(Tsv(train=source.train, tag="2de"))
    with pytest.raises(UserError, match=r"x: its source vocab splits <2de> into \d+ sub"):
        made(task, Vocabs(given, given))
