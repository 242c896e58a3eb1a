"""Trains and applies vocabs of SentencePiece's sub-words."""

import functools
import hashlib
import io
import logging
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Literal

import numpy as np
import sentencepiece
from pydantic import Field

from configs.errors import UserError
from configs.paths import path_of
from configs.spec import Count, spec

logger = logging.getLogger(__name__)

PAD = 0  # also what a decoder reads before its first target
EOS = 1
UNK = 2
UNK_WORD = "<UNK>"  # what LM1B's rule writes for a word outside the word list

_LONGEST_LINE_BYTES = 1 << 20  # SentencePiece's own limit, 4192, leaves out ordinary lines


@spec
class SentencePiece:
    """Sets how to train a vocab, or which trained one to take."""

    size: Count = 8192
    """Tokens of the vocabulary."""
    model_type: Literal["unigram", "bpe"] = "bpe"
    """On the docstrings, bpe trains in 0.4 s and unigram in 2.1 s; bpe gives 0.6 % fewer tokens at
    size 8192, unigram 0.8 % fewer at 4096."""
    character_coverage: Annotated[float, Field(gt=0, le=1)] = 0.9995
    """Share of characters that get sub-words; the rest are split into bytes."""
    byte_fallback: bool = True
    """Splits characters outside the vocabulary into bytes instead of losing them."""
    normalization: Literal["identity", "nfkc", "nmt_nfkc", "nmt_nfkc_cf"] = "identity"
    """With "identity" and byte_fallback, decoding reproduces the text exactly."""
    train_lines: Count = 1_000_000
    """Maximum number of lines to train on, chosen at random but always the same."""
    model_file: str | None = None
    """A trained SentencePiece model to use unchanged."""


class Vocab:
    """Maps text to ids and back by a trained vocab."""

    def __init__(self, model: bytes):
        self.model = model
        self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        self.size: int = self._processor.vocab_size()

    @functools.cached_property
    def hash(self) -> str:
        return hashlib.sha256(self.model).hexdigest()

    @functools.cached_property
    def dtype(self) -> type[np.unsignedinteger]:
        """Returns the smallest type that holds every id."""
        return np.uint16 if self.size <= 1 << 16 else np.uint32

    def encode(self, lines: Sequence[str]) -> list[np.ndarray]:
        """Returns the ids of each line, without EOS."""
        threads = min(os.cpu_count() or 1, 16)
        ids = self._processor.encode(list(lines), num_threads=threads)
        return [np.asarray(i, self.dtype) for i in ids]

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of ids up to the first EOS; padding has no text.

        A model may have more rows than the vocab has ids: those beyond read as UNK.
        """
        kept: list[int] = []
        for i in ids:
            if i == EOS:
                break
            if i != PAD:
                kept.append(int(i) if i < self.size else UNK)
        return str(self._processor.decode(kept))

    def pieces(self, ids: Iterable[int]) -> list[str]:
        """Returns the sub-words as SentencePiece writes them."""
        return [self._processor.id_to_piece(int(i)) for i in ids]

    def save(self, path: str | os.PathLike[str]) -> None:
        path_of(path).write_bytes(self.model)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Vocab":
        try:
            vocab = cls(path_of(path).read_bytes())
            vocab.pieces(range(vocab.size))  # those of a damaged one are not all text
            return vocab
        except OSError as error:
            raise UserError(f"vocab {path}: cannot be read: {error.strerror or error}.") from None
        except (RuntimeError, UnicodeDecodeError):
            raise UserError(f"vocab {path}: is not a SentencePiece model.") from None


def make(settings: SentencePiece, lines: Iterator[str], *, words: Sequence[str] = ()) -> Vocab:
    """Loads or trains the vocab that the settings describe; the same text gives the same vocab.

    words are those that are to be one sub-word each where they stand alone.
    """
    if settings.model_file is not None:
        vocab = Vocab.load(settings.model_file)
        _check_ids(vocab, settings.model_file)
        return vocab
    return _train(settings, lines, words)


def _train(settings: SentencePiece, lines: Iterator[str], words: Sequence[str]) -> Vocab:
    model, errors = io.BytesIO(), list[Exception]()
    sentencepiece.set_random_generator_seed(0)
    sentencepiece.set_min_log_level(2)
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=_noting_errors(_with_warning(lines), errors),
            model_writer=model,
            vocab_size=settings.size,
            model_type=settings.model_type,
            character_coverage=settings.character_coverage,
            byte_fallback=settings.byte_fallback,
            normalization_rule_name=settings.normalization,
            remove_extra_whitespaces=settings.normalization != "identity",
            input_sentence_size=settings.train_lines,
            shuffle_input_sentence=True,
            max_sentence_length=_LONGEST_LINE_BYTES,
            # A fixed number: the sums of unigram's training depend on how it shares out lines.
            num_threads=4,
            user_defined_symbols=["▁" + word for word in words],
            pad_id=PAD,
            eos_id=EOS,
            unk_id=UNK,
            bos_id=-1,
        )
    except RuntimeError as error:
        if errors:
            raise errors[0] from None
        raise UserError(_explain(settings, str(error))) from None
    return Vocab(model.getvalue())


def _noting_errors(lines: Iterator[str], errors: list[Exception]) -> Iterator[str]:
    """Keeps what a corpus raises, which SentencePiece would report as an error of its own."""
    try:
        yield from lines
    except Exception as error:
        errors.append(error)
        raise


def _with_warning(lines: Iterator[str]) -> Iterator[str]:
    """Logs how many lines SentencePiece leaves out."""
    left_out = 0
    for line in lines:
        # A character has at most four bytes; most lines need not be encoded to be measured.
        too_long = len(line) * 4 > _LONGEST_LINE_BYTES and len(line.encode()) > _LONGEST_LINE_BYTES
        left_out += too_long
        yield line
    if left_out:
        logger.warning(
            "The vocab is trained without %d lines of more than %d bytes.",
            left_out, _LONGEST_LINE_BYTES,
        )  # fmt: skip


def _explain(settings: SentencePiece, error: str) -> str:
    setting = f"SentencePiece.size = {settings.size}"
    if largest := re.search(r"Vocabulary size too high.*<= (\d+)", error):
        return (
            f"{setting}: this text gives at most {largest[1]} sub-words.  Set it to that or less."
        )
    if smallest := re.search(r"required_chars\. \d+ vs (\d+)", error):
        return (
            f"{setting}: the characters of this text alone need {smallest[1]} sub-words.  "
            "Set that size or more, or a smaller SentencePiece.character_coverage."
        )
    if "sentences_.empty" in error:
        return "SentencePiece: there is no text to train on."
    return f"{setting}: SentencePiece cannot train on this text: {error}"


def _check_ids(vocab: Vocab, path: str) -> None:
    processor = vocab._processor
    ids = (processor.pad_id(), processor.eos_id(), processor.unk_id())
    if ids != (PAD, EOS, UNK):
        raise UserError(
            f"SentencePiece.model_file = {path!r}: its ids of (padding, EOS, UNK) are {ids}; "
            f"legal: {(PAD, EOS, UNK)}.  "
            "Train it with --pad_id=0 --eos_id=1 --unk_id=2 --bos_id=-1."
        )
