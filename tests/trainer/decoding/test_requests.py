"""Requests of lines: their limits, and the order of what comes back."""

import dataclasses
from typing import Any

import pytest

from configs.errors import UserError
from data.sources.pair_kinds import ParallelFiles, Tsv
from data.tasks.prompts import PromptTask
from data.tasks.translation import Translation
from data.tokenizers.sentence_piece import SentencePiece
from data.vocab import EOS, make
from data.vocabs import Vocabs
from models.decoding.beam import Beam
from models.decoding.sampling import Sampling
from trainer.decoding.decoder import Request, TokenHypothesis
from trainer.decoding.requests import (
    DecodeOptions,
    Hypothesis,
    LineDecoder,
    check_search,
    continuation_requests,
    is_blank,
    line_seed,
    rank,
    suffix_of,
    to_hypothesis,
    translation_requests,
)

WORDS = ("kara", "lost", "mitu", "nevo")
VOCAB = make(SentencePiece(size=263), iter([" ".join(WORDS)] * 20), words=WORDS)
VOCABS = Vocabs(VOCAB, VOCAB)
TASK = Translation(
    name="toy", vocab=SentencePiece(size=263), length=30, source_length=4,
    source=ParallelFiles(train_source=("a",), train_target=("b",)),
)  # fmt: skip


def test_translations_are_limited_by_their_sources_and_the_model(log_lines: list[str]) -> None:
    options = DecodeOptions(length_factor=2.0, length_extra=3, min_tokens=4, prefix="mitu")
    short, cut = translation_requests(["kara", "kara lost mitu nevo"], TASK, VOCABS, options, 8)
    assert [len(request.source or ()) for request in (short, cut)] == [2, 4]
    assert short.source is not None and short.source[-1] == EOS
    assert [*short.prompt] == [*VOCAB.encode(["mitu"])[0]]
    # Two per source token and three, at most what the 8 positions leave after BEGIN and prefix.
    assert [request.max_new_tokens for request in (short, cut)] == [6, 6]
    assert [request.min_new_tokens for request in (short, cut)] == [5, 5]
    assert log_lines == [
        "Warning: 1 of 2 lines have more than 3 tokens (Translation.source_length); only their "
        "beginnings are translated."
    ]
    [free] = translation_requests(["kara"], TASK, VOCABS, options, None)
    assert free.max_new_tokens == 7


def test_a_blank_line_is_blank_behind_a_tag_too() -> None:
    source = Tsv(train="a", tag="kara")
    task = dataclasses.replace(TASK, source=source)
    lines = ["lost", "", " \t"]
    for requests in (
        translation_requests(lines, task, VOCABS, DecodeOptions(max_tokens=5), None),
        translation_requests(lines, TASK, VOCABS, DecodeOptions(max_tokens=5), None),
    ):
        assert [is_blank(request, VOCABS) for request in requests] == [False, True, True]


def test_a_prompt_must_leave_room_for_new_tokens() -> None:
    options = DecodeOptions(max_tokens=5)
    [request] = continuation_requests(["kara lost"], VOCABS, options, 8, 99)
    assert (len(request.prompt), request.max_new_tokens, request.min_new_tokens) == (2, 5, 1)
    with pytest.raises(UserError, match="line 2: 3 prompt tokens and 5 new ones do not fit"):
        continuation_requests(["kara", "kara lost mitu"], VOCABS, options, 8, 99)


def test_a_prompt_with_ends_of_turns_comes_back_whole() -> None:
    first, second, new = ([*map(int, ids)] for ids in VOCAB.encode(["kara", "lost", "mitu"]))
    request = Request([*first, EOS, *second], 5)
    hypothesis = to_hypothesis(request, TokenHypothesis(new, -1.5, -2.5), VOCABS)
    assert hypothesis.text == "kara lost mitu"


def test_an_answer_is_without_its_prompt() -> None:
    task = PromptTask(
        name="t", source=Tsv(train="a"), vocab=TASK.vocab, length=20, template="kara {prompt}"
    )
    unused: Any = None
    decoder = LineDecoder(unused, task, Vocabs(VOCAB, None), DecodeOptions(), None)
    [request] = decoder.requests(["lost"])
    new = [*map(int, VOCAB.encode_continuation(" mitu"))]
    hypothesis = to_hypothesis(request, TokenHypothesis(new, -1.5, -2.5), VOCABS)
    assert hypothesis.text.strip() == "mitu"


def test_an_answer_begins_without_the_space_before_its_first_word() -> None:
    """Its tokens are those of a text alone, to which SentencePiece adds a space."""
    vocab = make(SentencePiece(size=275), iter(["the reader reads the end of the spaces"] * 9))
    prompt, answer = vocab.encode(["the reader", "reads the end"])
    new = TokenHypothesis((*map(int, answer),), -1.5, -2.5)
    request = Request(prompt, 9, is_answer=True)
    assert to_hypothesis(request, new, Vocabs(vocab, vocab)).text == "reads the end"


def test_seeds_differ_by_line_and_by_seed() -> None:
    seeds = {line_seed(DecodeOptions(seed=seed), line) for seed in range(3) for line in range(3)}
    assert len(seeds) == 9


def test_consensus_moves_one_text_to_the_front() -> None:
    texts = [Hypothesis(text, 0.0, 0.0) for text in ("a dog", "a cat sat", "a cat")]
    assert rank(texts, DecodeOptions()) == texts
    ranked = rank(texts, DecodeOptions(consensus=True))
    assert [one.text for one in ranked] == ["a cat sat", "a dog", "a cat"]


@pytest.mark.parametrize(
    "options", [DecodeOptions(consensus=True), DecodeOptions(rescore_suffix="good")]
)
def test_what_ranks_samples_needs_them(options: DecodeOptions) -> None:
    check_search(options, Sampling(width=4))
    for search in (Sampling(), Beam()):
        with pytest.raises(UserError, match="--samples=16"):
            check_search(options, search)


def test_samples_are_ranked_in_one_way() -> None:
    options = DecodeOptions(consensus=True, rescore_suffix="good")
    with pytest.raises(UserError, match="--consensus and --rescore_suffix"):
        check_search(options, Sampling(width=4))


def test_a_suffix_has_tokens_and_needs_room() -> None:
    options, vocabs = DecodeOptions(rescore_suffix=" lost nevo"), VOCABS
    suffix = suffix_of(options, vocabs)
    [kara, whole] = VOCAB.encode(["kara", "kara lost nevo"])
    assert (*kara, *suffix) == (*whole,)
    assert suffix_of(DecodeOptions(), vocabs) == ()
    with pytest.raises(UserError, match="no tokens"):
        suffix_of(DecodeOptions(rescore_suffix=""), vocabs)
    room = 1 + 1 + 5 + len(suffix)
    continuation_requests(["kara"], vocabs, options, room, 5)
    with pytest.raises(UserError, match=f"and {len(suffix)} of --rescore_suffix"):
        continuation_requests(["kara"], vocabs, options, room - 1, 5)
    [request] = translation_requests(["kara"], TASK, vocabs, options, 1 + 2 + len(suffix))
    assert request.max_new_tokens == 2
    with pytest.raises(UserError, match="no room"):
        translation_requests(["kara"], TASK, vocabs, options, 1 + len(suffix))
