"""Span corruption: source and target together have each token of a text once."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from configs.errors import UserError
from data.sources.text import TextFiles
from data.tasks.span_corruption import SENTINELS, SpanCorruption
from data.tokenizers.sentence_piece import SentencePiece
from data.vocabs import Vocabs
from tests.toys import TOY
from trainer.optimizers.adamw import AdamW
from trainer.run import Run

LINES = [f"{'the mean of number ' * (i % 40)}{i} is {i * i}" for i in range(200)]
MARKS = np.arange(1000, 1000 + len(SENTINELS))


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> SpanCorruption:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("\n".join(LINES))
    vocab = SentencePiece(size=180, byte_fallback=False)
    source = TextFiles(train=str(path))
    return SpanCorruption(name="spans", source=source, vocab=vocab, length=20, source_length=60)


@pytest.fixture(scope="module")
def vocabs(task: SpanCorruption) -> Vocabs:
    return task.make_vocabs(None)


def restored(source: np.ndarray, target: np.ndarray, marks: np.ndarray) -> list[int]:
    """What a source and a target were made of."""
    spans: dict[int, list[int]] = {}
    for token in target.tolist():
        if token in marks:
            spans[last := token] = []
        else:
            spans[last].append(token)
    tokens = [[token] if token not in marks else spans.pop(token) for token in source.tolist()]
    assert not spans
    return [token for part in tokens for token in part]


def test_rows_of_512_and_114_tokens_hold_568_as_in_t5(task: SpanCorruption) -> None:
    whole = dataclasses.replace(task, length=114, source_length=512)
    assert whole.spans(568) == (85, 28)
    assert whole.fits(568) and not whole.fits(569)


@pytest.mark.parametrize(("density", "mean"), [(0.15, 3.0), (0.5, 3.0), (0.9, 1.0), (0.01, 20.0)])
def test_source_and_target_have_each_token_once(
    task: SpanCorruption, density: float, mean: float
) -> None:
    task = dataclasses.replace(task, noise_density=density, mean_noise_span_length=mean)
    for size in (1, 2, 3, 7, 57, 101):
        tokens = np.random.default_rng(size).integers(3, 900, size)
        replaced, spans = task.spans(size)
        assert abs(replaced - density * size) <= 1 and 1 <= spans <= replaced
        several = {}
        for draw in range(20):
            source, target = task.corrupted(tokens, MARKS, draw)
            assert restored(source, target, MARKS) == tokens.tolist()
            assert len(source) == size - replaced + spans and len(target) == replaced + spans
            assert [x for x in source if x in MARKS] == MARKS[:spans].tolist() and target[0] == 1000
            assert not np.any((source[1:] > 999) & (source[:-1] > 999))  # they do not touch
            several[source.tobytes()] = draw
            again, _ = task.corrupted(tokens.astype(np.uint16), MARKS, draw)
            np.testing.assert_array_equal(again, source)
        assert size < 57 or density < 0.1 or len(several) > 15


@pytest.mark.parametrize("draws", [1, 2])
def test_rows_hold_all_pieces_of_all_lines(
    task: SpanCorruption, vocabs: Vocabs, draws: int
) -> None:
    task = dataclasses.replace(task, draws=draws)
    packed, counts = task.chunk_packer(vocabs)(LINES, None, True)
    marks, end = task.sentinels_of(vocabs.target), vocabs.target.end_id
    arrays = packed.arrays
    pieces: dict[int, list[list[int]]] = {}
    for line, row, segment in packed.pieces.tolist():
        target = arrays["targets"][row][arrays["segments"][row] == segment]
        source = arrays["sources"][row][arrays["source_segments"][row] == segment]
        assert target[-1] == source[-1] == end
        pieces.setdefault(line, []).append(restored(source[:-1], target[:-1], marks))
    encoded = [tokens.tolist() for tokens in vocabs.target.encode(LINES)]
    assert max(map(len, pieces.values())) > draws
    for line, tokens in enumerate(encoded):
        size = max(map(len, pieces[line]))
        expected = [tokens[i : i + size] for i in range(0, len(tokens), size)] * draws
        assert sorted(pieces[line]) == sorted(expected)
    assert counts.lines == len(LINES) and counts.rows == len(arrays["targets"])
    assert counts.tokens == np.count_nonzero(arrays["segments"])
    assert counts.source_tokens == np.count_nonzero(arrays["source_segments"])
    evaluated = task.rows_of_text(LINES, vocabs)
    assert evaluated.counts.tokens * draws == counts.tokens
    assert {"inputs_BM", "targets_BL"} <= {*evaluated.batch(np.arange(2))}


def test_a_text_with_a_sentinel_is_left_out(task: SpanCorruption, vocabs: Vocabs) -> None:
    lines = [LINES[3], f"the mean {SENTINELS[7]} number", LINES[5]]
    packed, counts = task.chunk_packer(vocabs)(lines, None, True)
    assert {*packed.pieces[:, 0].tolist()} == {0, 2}
    assert (counts.lines, counts.left_out) == (2, 1)
    packed, counts = task.chunk_packer(vocabs)(lines[1:2], None, True)
    assert (len(packed.pieces), counts.lines, counts.left_out) == (0, 0, 1)


def test_words_and_bytes_are_those_of_the_spans(task: SpanCorruption, vocabs: Vocabs) -> None:
    """Whatever a vocabulary makes of sentinels."""
    lines = ["the mean of number is the mean of number is the mean"] * 3
    _, counts = task.chunk_packer(vocabs)(lines, None, True)
    marks, rows = task.sentinels_of(vocabs.target), task.rows_of_text(lines, vocabs)
    targets = [tokens for tokens in rows.arrays["targets"][0].tolist() if tokens]
    spans, words = "", vocabs.target
    for token in targets[: targets.index(words.end_id)]:
        spans += " " if token in marks else words.pieces([token])[0].replace("▁", " ")
    assert counts.words == 3 * len(spans.split())
    assert counts.bytes == 3 * (len(" ".join(spans.split())) + 1)


def test_a_vocab_that_the_task_trains_keeps_newlines(task: SpanCorruption, tmp_path: Path) -> None:
    (file := tmp_path / "text.txt").write_text("\n".join(LINES).replace("number 3", "\n\nof"))
    source = TextFiles(train=str(file), example="paragraph")
    vocab = dataclasses.replace(task, source=source).make_vocabs(None).target
    assert vocab.decode(vocab.encode(["mean of\nmean"])[0]) == "mean of\nmean"


def test_what_makes_no_sense_is_refused(
    task: SpanCorruption, vocabs: Vocabs, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=r"length = 2, source_length = 60: no piece of two"):
        dataclasses.replace(task, length=2)
    with pytest.raises(UserError, match="cannot score a line"):
        task.pack_lines(LINES, vocabs, None)
    plain = SentencePiece(size=60, byte_fallback=False).train(iter(LINES), [])
    with pytest.raises(UserError, match=r"its vocab lacks <extra_id_0> to <extra_id_99>"):
        task.make_vocabs(Vocabs(plain, plain))
    (file := tmp_path / "vocab.model").write_bytes(vocabs.target.model)
    given = dataclasses.replace(task, vocab=SentencePiece(model_file=str(file)))
    assert given.make_vocabs(None).target.hash == vocabs.target.hash
    with pytest.raises(UserError, match="the task is not a translation task"):
        Run(model=TOY, task=task, optimizer=AdamW(), steps=1, batch_sequences=8, bleu_sentences=3)
