"""The vocab: lossless, deterministic, and clear about sizes that a text does not give."""

import itertools
import random

import numpy as np
import pytest
import sentencepiece

from configs.errors import UserError
from data.packing.rows import with_unk
from data.tokenizers import sentence_piece
from data.tokenizers.sentence_piece import SentencePiece
from data.vocab import EOS, PAD, UNK, UNK_WORD, make
from data.vocabs import load_vocab

PARTS = (("re", "un", "de"), ("ad", "ten", "mo"), ("er", "el"))
WORDS = list(map("".join, itertools.product(*PARTS)))


@pytest.fixture(scope="module")
def lines():
    chosen = random.Random(0)
    return [" ".join(chosen.choices(WORDS, k=12)) + "." for _ in range(300)]


@pytest.fixture(scope="module")
def vocab(lines):
    return make(SentencePiece(size=320), iter(lines))


def test_special_ids_and_size(vocab):
    assert (PAD, EOS, UNK) == (0, 1, 2)
    assert vocab.size == 320
    assert vocab.dtype is np.uint16


@pytest.mark.parametrize("text", ["the model", "  two  spaces ", "naïve 漢字 \t\u2028 x", ""])
def test_decoding_gives_the_text_back(vocab, text):
    [ids] = vocab.encode([text])
    assert vocab.decode([*ids, EOS, 5, 6]) == text


@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
def test_the_same_text_gives_the_same_vocab(lines, model_type):
    settings = SentencePiece(size=285, model_type=model_type, train_lines=200)
    assert make(settings, iter(lines)).hash == make(settings, iter(lines)).hash


def test_few_lines_have_the_ids_that_they_have_among_many(vocab, lines):
    together = vocab.encode(lines[:50])
    apart = [ids for line in lines[:50] for ids in vocab.encode([line])]
    assert len(together) == len(apart) == 50
    for ids, same in zip(together, apart, strict=True):
        np.testing.assert_array_equal(ids, same, strict=True)


@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
@pytest.mark.parametrize("byte_fallback", [True, False])
@pytest.mark.parametrize("normalization", ["identity", "nmt_nfkc"])
@pytest.mark.parametrize("text", [" reader untenel.", " deader", ".", ".reader", " ", ""])
def test_a_continuation_has_the_ids_that_it_has_behind_a_text(
    lines, model_type, byte_fallback, normalization, text
):
    settings = SentencePiece(
        size=285 if byte_fallback else 34, model_type=model_type, byte_fallback=byte_fallback,
        normalization=normalization, character_coverage=1.0,
    )  # fmt: skip
    vocab = make(settings, iter([*lines, "reader.ten"]))
    [before, whole] = vocab.encode(["reader", "reader" + text])
    assert [*before, *vocab.encode_continuation(text)] == [*whole]


def test_a_saved_vocab_is_the_same(vocab, tmp_path):
    (tmp_path / "v").write_bytes(vocab.model)
    assert load_vocab(tmp_path / "v").hash == vocab.hash


@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
def test_too_large_a_size_names_the_largest(lines, model_type):
    with pytest.raises(UserError, match=r"SentencePiece.size = 9000: .* at most (\d+)") as error:
        make(SentencePiece(size=9000, model_type=model_type), iter(lines))
    largest = int(str(error.value).split("at most ")[1].split()[0])
    assert make(SentencePiece(size=largest, model_type=model_type), iter(lines)).size == largest


def test_too_small_a_size_names_the_smallest(lines):
    with pytest.raises(UserError, match=r"size = 100: the characters .* need (\d+)") as error:
        make(SentencePiece(size=100), iter(lines))
    smallest = int(str(error.value).split("need ")[1].split()[0])
    assert make(SentencePiece(size=smallest), iter(lines)).size == smallest


def test_no_text_is_an_error():
    with pytest.raises(UserError, match="no text to train on"):
        make(SentencePiece(size=300), iter([]))


def test_unk_word_is_one_subword(lines):
    vocab = make(SentencePiece(size=320), iter(lines), words=[UNK_WORD])
    [text] = with_unk(["the  strange model"], frozenset({"the", "model"}))
    assert text == "the  <UNK> model"
    assert "▁<UNK>" in vocab.pieces(vocab.encode([text])[0])


@pytest.mark.parametrize(
    ("ids", "begin", "end", "pad"),
    [
        ({}, 1, 2, None),  # SentencePiece's own defaults, which Llama 2 has
        ({"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}, 0, 1, 0),
        ({"unk_id": 0, "eos_id": 3, "bos_id": -1}, 3, 3, None),
    ],
)
def test_a_model_from_elsewhere_keeps_its_ids(lines, tmp_path, ids, begin, end, pad):
    path = tmp_path / "foreign"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_prefix=str(path), vocab_size=32, **ids
    )
    vocab = make(SentencePiece(model_file=f"{path}.model"), iter(()))
    assert (vocab.begin_id, vocab.end_id, vocab.pad_id) == (begin, end, pad)
    [encoded] = vocab.encode([lines[0]])
    assert vocab.decode([*encoded, end, 7]) == lines[0]


def test_a_model_without_an_end_is_refused(lines, tmp_path):
    path = tmp_path / "endless"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_prefix=str(path), vocab_size=32, eos_id=-1
    )
    with pytest.raises(UserError, match="no id ends a text"):
        make(SentencePiece(model_file=f"{path}.model"), iter(()))


def test_files_that_are_no_vocab_are_refused(tmp_path):
    (tmp_path / "x").write_bytes(b"nonsense")
    with pytest.raises(UserError, match="is not a SentencePiece model"):
        make(SentencePiece(model_file=str(tmp_path / "x")), iter([]))
    with pytest.raises(UserError, match="No such file"):
        make(SentencePiece(model_file=str(tmp_path / "y")), iter([]))


def test_an_error_of_the_corpus_is_not_one_of_sentencepiece(lines):
    def corpus():
        yield from lines
        raise UserError("text.txt, line 7: byte 3 is 0xff, not UTF-8")

    with pytest.raises(UserError, match=r"^text.txt, line 7"):
        make(SentencePiece(size=320), corpus())


def test_lines_that_training_leaves_out_are_counted(lines, caplog):
    make(SentencePiece(size=320), iter([*lines, "reader " * 150_000]))
    assert "without 1 lines of more than 1048576 bytes" in caplog.text


def test_a_vocab_with_a_damaged_piece_is_refused(vocab, tmp_path):
    piece = vocab.pieces([vocab.size - 1])[0].encode()
    damaged = vocab.model.replace(piece, b"\xff" * len(piece))
    (tmp_path / "vocab.model").write_bytes(damaged)
    with pytest.raises(UserError, match="is not a SentencePiece model"):
        load_vocab(tmp_path / "vocab.model")


def test_a_newline_is_one_subword_anywhere(lines):
    vocab = make(SentencePiece(size=320), iter([*lines, "\nremoer"]), words=["\n"])
    text = "remoer\n\nundemo\n"
    [ids] = vocab.encode([text])
    assert vocab.pieces(ids).count("\n") == 3
    assert not any("\n" in piece for piece in vocab.pieces(range(vocab.size)) if piece != "\n")
    assert vocab.decode(ids) == text


def test_a_sample_of_the_lines_is_always_the_same():
    """SentencePiece's own differs from one process to the next."""
    lines = [f"line {i} of {i * i} words" for i in range(3000)]
    sample = list(sentence_piece._sampled(iter(lines), 400))
    assert len(set(sample)) == 400 and set(sample) < set(lines)
    numbers = [int(line.split()[1]) for line in sample]
    assert abs(np.mean(numbers) - 1500) < 150
    assert numbers[:4] == [802, 1393, 2373, 2573]  # never changes between versions
    assert list(sentence_piece._sampled(iter(lines), 3000)) == lines
    settings = SentencePiece(size=290, train_lines=400)
    assert make(settings, iter(lines)).hash == make(settings, iter(sample)).hash
