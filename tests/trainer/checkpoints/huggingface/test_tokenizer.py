"""Exported tokenizers: the same ids as the vocab gives, after the token that begins a text."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
import tokenizers

from data.tokenizers.sentence_piece import SentencePiece
from data.tokenizers.tokenizer_json import TokenizerJsonVocab
from data.vocab import Vocab, make
from tests.toys import ROOT
from trainer.checkpoints.huggingface.tokenizer import tokenizer_files

TEXTS = [
    *(ROOT / "README.md").read_text().splitlines(),
    "", " ", "  a  b ", "a\nb\n\n c ", "\na", "====  ----", "naïve 日本 ﬁ ½ e\u0301", "a\tb\u00a0c",
    "a </s> <pad> <0x41> \u2581", "an <UNK> and<UNK> b",
]  # fmt: skip


def exported(vocab: Vocab) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    files, _ = tokenizer_files(vocab)
    tokenizer = tokenizers.Tokenizer.from_str(files["tokenizer.json"].decode())
    config = json.loads(files["tokenizer_config.json"])
    tokenizer.encode_special_tokens = config.get("split_special_tokens", False)
    return tokenizer, config


@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
@pytest.mark.parametrize("normalization", ["identity", "nmt_nfkc"])
@pytest.mark.parametrize("words", [(), ("\n", "<UNK>")])
def test_a_trained_vocab_gives_the_same_ids(
    model_type: str, normalization: str, words: Sequence[str]
) -> None:
    settings: dict[str, Any] = {"model_type": model_type, "normalization": normalization}
    vocab = make(SentencePiece(size=400, **settings), iter(TEXTS), words=words)
    tokenizer, config = exported(vocab)
    expected = [[vocab.begin_id, *map(int, ids)] for ids in vocab.encode(TEXTS)]
    assert [tokenizer.encode(text).ids for text in TEXTS] == expected
    assert [tokenizer.decode(ids) for ids in expected] == [vocab.text(ids) for ids in expected]
    # Hugging Face's library masks padding, so it is not what begins a text.
    assert (config["bos_token"], config["eos_token"], config["pad_token"]) == (
        "<pad>", "</s>", "<unk>",
    )  # fmt: skip


@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
@pytest.mark.parametrize("normalization", ["identity", "nfkc"])
@pytest.mark.parametrize("byte_fallback", [True, False])
@pytest.mark.parametrize("words", [(), ("\n",)])
def test_no_text_is_read_as_a_token_that_has_none(
    model_type: str, normalization: str, byte_fallback: bool, words: Sequence[str]
) -> None:
    """Also where a name of such a token has characters that are not in the vocabulary."""
    settings: dict[str, Any] = {"model_type": model_type, "normalization": normalization}
    size = (285 if byte_fallback else 29) + len(words)
    tokens = SentencePiece(size=size, byte_fallback=byte_fallback, **settings)
    lines = ["the cat sat on the mat and ate a rat", "one two three four five six", "plain text"]
    vocab = make(tokens, iter(lines * 3), words=words)
    texts = [
        "</s>", "<pad>", "<unk>", "<0x41>", "<pad> <s> </s> <unk>", "a</s>b", "the<unk>cat<0x0A>",
        "\u2581", "a \u2581", "\n</s>\n<0x0A>\n", "the cat \U0001f600 sat", "日本 a plain é",
    ]  # fmt: skip
    tokenizer, _ = exported(vocab)
    expected = [[vocab.begin_id, *map(int, ids)] for ids in vocab.encode(texts)]
    assert [tokenizer.encode(text).ids for text in texts] == expected
    if byte_fallback:
        assert [tokenizer.decode(ids) for ids in expected] == [vocab.text(ids) for ids in expected]


def test_a_tokenizer_json_reads_the_beginning_that_training_reads() -> None:
    """A tokenizer that puts nothing before a text, in a model that was trained with it here."""
    pieces = {token: i for i, token in enumerate(["<s>", "</s>", "<eot>", *"ab"])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(pieces, []))
    tokenizer.add_special_tokens(["<s>", "</s>", "<eot>"])
    files = {
        "tokenizer.json": tokenizer.to_str(),
        "tokenizer_config.json": '{"chat_template": "{{ messages }}"}',
        "generation_config.json": '{"eos_token_id": 2, "temperature": 0.5}',
    }
    special = {"begin": "<s>", "end": "</s>"}
    bundle = {"format": "meshloom tokenizer.json 1", "special": special, "files": files}
    vocab = TokenizerJsonVocab(json.dumps(bundle).encode())
    written, ids = tokenizer_files(vocab)
    again, config = exported(vocab)
    assert again.encode("ab").ids == [0, 3, 4] and again.encode("a", "b").ids == [0, 3, 4]
    assert config == {
        "chat_template": "{{ messages }}",
        "bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>",
    }  # fmt: skip
    generation = json.loads(written["generation_config.json"])
    assert generation == {**ids, "eos_token_id": [1, 2], "temperature": 0.5}
