"""Translating what a task holds out: each part on its own, and what is said of it."""

from collections.abc import Iterator, Sequence
from typing import cast

from data.sources.pair_kinds import ParallelFiles
from data.tasks.translation import Translation
from data.tokenizers.sentence_piece import SentencePiece
from data.vocab import make
from data.vocabs import Vocabs
from trainer.decoding.decoder import Decoder, Request, TokenHypothesis
from trainer.decoding.requests import DecodeOptions, LineDecoder
from trainer.translation.evaluate import EvaluationSet, TranslatedSet, subset, translate

WORDS = ("kara", "lost", "mitu", "nevo")
VOCAB = SentencePiece(size=263)  # the words, 256 bytes and three others
TASK = Translation(
    name="toy", vocab=VOCAB, length=8, source_length=4,
    source=ParallelFiles(train_source=("a",), train_target=("b",)),
)  # fmt: skip


class Echo:
    """Answers with the source, without its end."""

    def decode(
        self, requests: Sequence[Request]
    ) -> Iterator[list[tuple[int, list[TokenHypothesis]]]]:
        for i, request in enumerate(requests):
            assert request.source is not None
            yield [(i, [TokenHypothesis([*map(int, request.source[:-1])], 0.0, 0.0)])]


def part(name: str, *sources: str) -> EvaluationSet:
    return EvaluationSet.whole(name, None, [*sources], [[*sources]])


def echoed(*parts: EvaluationSet, **measuring: str) -> list[TranslatedSet]:
    vocab = make(VOCAB, iter([" ".join(WORDS)] * 20), words=WORDS)
    echo, vocabs = cast(Decoder, Echo()), Vocabs(vocab, vocab)
    decoder = LineDecoder(echo, TASK, vocabs, DecodeOptions(), None)
    return translate(decoder, parts, resamples=0, **measuring)


def test_a_warning_names_its_part_where_there_are_several(log_lines: list[str]) -> None:
    short, long = part("xx", "kara lost"), part("yy", "mitu", "kara lost mitu nevo")
    translated = echoed(short, long)
    assert [(one.part.name, one.texts) for one in translated] == [
        ("all", ["kara lost", "mitu", "kara lost mitu"]),
        ("xx", ["kara lost"]),
        ("yy", ["mitu", "kara lost mitu"]),
    ]
    echoed(long)
    assert [line.partition(" have")[0] for line in log_lines] == [
        "Warning: yy: 1 of 2 lines",
        "Warning: 1 of 2 lines",
    ]


def test_the_language_of_a_test_set_chooses_the_tokenizer() -> None:
    [translated] = echoed(part("xx", "kara lost"), test_set="toy", languages="en-zh")
    assert {"test:toy", "lang:en-zh", "tok:zh"} <= {*translated.metrics.bleu.signature.split("|")}


def test_what_is_measured_can_be_written_line_by_line() -> None:
    two = part("xx", "kara", "lost")._replace(references=[["a", "b"], ["c", "d"]])
    [whole] = echoed(two)
    assert whole.files() == {
        "": ["kara", "lost"], ".source": ["kara", "lost"], ".reference1": ["a", "b"],
        ".reference2": ["c", "d"], ".lines": ["xx\t1", "xx\t2"],
    }  # fmt: skip
    broken = whole._replace(part=two._replace(sources=["a\rb", "c"], references=[["d\re", "f"]]))
    assert broken.files()[".source"] == ["a b", "c"]
    assert broken.files()[".reference"] == ["d e", "f"]
    parts = subset([part("xx", "kara"), part("yy", "lost", "mitu", "nevo")], 2)
    assert echoed(*parts)[0].files()[".lines"] == ["yy\t1", "yy\t3"]


def test_a_subset_is_spread_over_all_parts() -> None:
    parts = [part("xx", *map(str, range(30))), part("yy", *map(str, range(70)))]
    assert [len(one.sources) for one in subset(parts, 10)] == [3, 7]
    [chosen] = subset(parts, 2)
    assert (chosen.sources, chosen.references) == (["19", "69"], [["19", "69"]])
    assert chosen.lines == [("yy", 20), ("yy", 70)]
    assert subset(parts, 1000) == parts
