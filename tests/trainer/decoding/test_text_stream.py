"""Texts as their tokens come: they add up to the whole text, in time that grows with it."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from data.tokenizers.sentence_piece import SentencePiece
from data.tokenizers.tokenizer_json import TokenizerJson
from data.vocab import Vocab, make
from tests.data.test_vocab import Digits
from tests.data.tokenizers.test_tokenizer_json import byte_fallback, byte_level
from trainer.decoding.text_stream import TextStream, start_of_stop

TEXT = "the naïve reader,  two\tspaces: 漢字 and 👩‍🚀!\nthe end "


def word_piece() -> tokenizers.Tokenizer:
    pieces = ["[UNK]", "</s>", "the", "end", "read", "##er", ",", "!", "##e"]
    tokenizer = tokenizers.Tokenizer(
        models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(["[UNK]", "</s>"])
    return tokenizer


KINDS = ["bpe", "unigram", "spaces dropped", byte_level, byte_fallback, word_piece]


@pytest.fixture(params=KINDS, scope="module")
def vocab(request: Any, tmp_path_factory: Any) -> Vocab:
    if isinstance(request.param, str):
        kind = "unigram" if request.param == "unigram" else "bpe"
        normalization = "nmt_nfkc" if request.param == "spaces dropped" else "identity"
        settings = SentencePiece(size=275, model_type=kind, normalization=normalization)
        return make(settings, iter(["the reader reads the end of the spaces", "and reads on"] * 9))
    folder = tmp_path_factory.mktemp("vocab")
    request.param().save(str(folder / "tokenizer.json"))
    return make(TokenizerJson(path=str(folder), end="</s>"), iter(()))


def pieces_of(stream: TextStream, tokens: Sequence[int], at_once: int) -> list[str]:
    ends = [*range(at_once, len(tokens), at_once), len(tokens)]
    return [stream.add(tokens[:end], is_done=end == len(tokens)) for end in ends]


@pytest.mark.parametrize("at_once", [1, 2, 3])
def test_a_text_apart_from_its_prompt_begins_as_one_alone(vocab: Vocab, at_once: int) -> None:
    """SentencePiece puts a space before a word, which is that of a text but not of an answer."""
    prompt, answer = vocab.encode(["the reader", "reads the end"])
    stream = TextStream(vocab, prompt, [], apart=True)
    text = "".join(pieces_of(stream, [*map(int, answer)], at_once))
    assert text == vocab.text(answer) and not text.startswith(" ")


@pytest.mark.parametrize("at_once", [1, 2, 3, 4])
@pytest.mark.parametrize("stops", [[], ["\nnever", "dinner"]])
def test_the_pieces_of_a_text_are_the_whole_text(
    vocab: Vocab, at_once: int, stops: list[str]
) -> None:
    for prompt_text in ("", "the", TEXT):
        [prompt, whole] = vocab.encode([prompt_text, prompt_text + TEXT])
        tokens = [*map(int, whole[len(prompt) :])]
        stream = TextStream(vocab, prompt, stops)
        pieces = pieces_of(stream, tokens, at_once)
        text = vocab.text([*prompt, *tokens])
        assert stream.prompt_text + "".join(pieces) == text
        assert stream.text == "".join(pieces)
        assert sum(map(bool, pieces)) > 2  # it comes in parts


@pytest.mark.parametrize("seed", range(20))
def test_the_pieces_of_any_tokens_are_the_whole_text(vocab: Vocab, seed: int) -> None:
    draw = random.Random(seed)
    prompt, tokens = (draw.choices(range(vocab.size), k=k) for k in (draw.randrange(4), 60))
    stream = TextStream(vocab, prompt, ["never"])
    pieces = pieces_of(stream, tokens, draw.randint(1, 4))
    assert stream.prompt_text + stream.text == vocab.text([*prompt, *tokens])
    assert stream.text == "".join(pieces)


def test_characters_stay_before_bytes_that_are_part_of_none(tmp_path: Path) -> None:
    byte_fallback().save(str(tmp_path / "tokenizer.json"))
    vocab = make(TokenizerJson(path=str(tmp_path), end="</s>"), iter(()))
    [prompt, lone] = vocab.encode(["the x² 東京", "é"])
    stream = TextStream(vocab, prompt, [])
    assert stream.add([*lone[-2:-1]] * 3, is_done=True) == "\N{REPLACEMENT CHARACTER}" * 3
    assert stream.prompt_text == "the x² 東京"


def test_a_text_is_detokenized_in_time_that_grows_with_it() -> None:
    class Counting(Digits):
        count = 0

        def _text(self, ids: list[int]) -> str:
            self.count += len(ids)
            return super()._text(ids)

    vocab, tokens = Counting(), [1, 2, 3, 4] * 500
    assert "".join(pieces_of(TextStream(vocab, [5, 6], ["99"]), tokens, 1)) == "1234" * 500
    assert vocab.count < 10 * len(tokens)


def test_a_stop_is_found_across_pieces_and_nothing_of_it_is_given_out() -> None:
    stream = TextStream(Digits(), [7], ["23456"])
    assert pieces_of(stream, [1, 2, 3, 2, 3, 4, 5, 6, 0], 1) == [
        "1", "", "", "23", "", "", "", "", ""
    ]  # fmt: skip
    assert stream.stopped_after == 8


def test_a_long_stop_takes_no_memory() -> None:
    """A set of all its beginnings would take 5 TB."""
    assert start_of_stop("one a" + "b" * 9, "a" + "b" * 10_000_000) == 4
