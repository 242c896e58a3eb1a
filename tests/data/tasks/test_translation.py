"""Tasks of translation: segmentations of their pairs, tags, and what they refuse."""

import pytest

from configs.errors import UserError
from data.cache import prepare
from data.sources.pair_kinds import Mixture, Phrases
from data.sources.text import Docstrings
from data.task import Task
from data.tasks.translation import Translation
from data.tokenizers.sentence_piece import SentencePiece
from data.tokenizers.tokenizer_json import TokenizerJson
from data.vocab import make


def translation(**changes):
    settings = {"name": "x", "source": Phrases(), "vocab": SentencePiece(), "length": 9}
    return Translation(**(settings | {"source_length": 7} | changes))


def test_a_translation_has_no_word_list():
    with pytest.raises(UserError, match=r"Translation.word_list = 'words'"):
        translation(word_list="words")


def test_each_segmentation_of_the_training_pairs_is_in_the_rows(tmp_path):
    source = Phrases(train=60, held_out=9)
    plain, sampled = (
        prepare(
            translation(
                name=name, source=source, vocab=SentencePiece(size=400), length=190,
                source_length=180, bpe_dropout=rate, segmentations=3 if rate else 1,
            ),
            tmp_path,
        )
        for name, rate in (("plain", 0.0), ("sampled", 0.4))
    )  # fmt: skip
    assert plain.vocab.hash == sampled.vocab.hash
    counts, more = plain.splits["train"].counts, sampled.splits["train"].counts
    assert (more.lines, more.repeats) == (counts.lines, 2 * counts.lines)
    assert (more.words, more.source_bytes) == (counts.words, counts.source_bytes)
    assert more.tokens > 3.2 * counts.tokens and more.source_tokens > 3.2 * counts.source_tokens
    for split in ("validation", "test"):
        assert plain.splits[split].counts == sampled.splits[split].counts


def test_segmentations_differ_by_bpe_dropout_alone():
    with pytest.raises(UserError, match=r"Translation.segmentations = 3: all would be equal"):
        translation(segmentations=3)


@pytest.mark.parametrize(
    "vocab", [SentencePiece(model_type="unigram"), TokenizerJson(path="x", end="</s>")]
)
def test_bpe_dropout_needs_merges(vocab):
    with pytest.raises(UserError, match=r"Translation.bpe_dropout = 0.1: .*has no merges to skip"):
        translation(vocab=vocab, bpe_dropout=0.1)


def test_bpe_dropout_with_another_trained_vocab_is_refused_before_rows_are_packed(tmp_path):
    lines = [f"line {i}" for i in range(90)]
    unigram = make(SentencePiece(size=280, model_type="unigram"), iter(lines))
    (tmp_path / "x.model").write_bytes(unigram.model)
    vocab = SentencePiece(model_file=f"{tmp_path}/x.model")
    task = translation(vocab=vocab, bpe_dropout=0.1)
    with pytest.raises(UserError, match="model_type of the vocab is unigram"):
        task.make_vocabs(None, None)


def test_a_task_knows_the_tags_of_its_parts():
    parts = [Phrases(language="en", target_language=x, tag=f"2{x}") for x in ("de", "fr", "de")]
    assert translation(source=Mixture(parts=parts)).tags == ("2de", "2fr")
    assert translation().tags == ()
    assert Task(name="x", source=Docstrings(), vocab=SentencePiece(), length=8).tags == ()
