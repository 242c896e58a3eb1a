"""Trains and applies SentencePiece vocabs."""

import io
import itertools
import logging
import random
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Literal

import numpy as np
import sentencepiece
from pydantic import Field

from configs.errors import UserError
from configs.spec import Count, spec
from data.memory import trim_memory
from data.vocab import EOS, PAD, UNK, Tokenizer, Vocab, read_model, thread_count

logger = logging.getLogger(__name__)

FEW_LINES = 4
"""Up to this many lines, one thread encodes: to start more takes as long as about 20 short ones."""
_LONGEST_LINE_BYTES = 1 << 20  # SentencePiece's default limit, 4192, drops ordinary lines


@spec
class SentencePiece(Tokenizer):
    """Trains a SentencePiece vocab, or uses a trained one."""

    size: Count = 8192
    """Tokens of the vocabulary."""
    model_type: Literal["unigram", "bpe"] = "bpe"
    """On the docstrings, bpe trains in 0.4 s and unigram in 2.1 s; bpe yields 0.6 % fewer tokens at
    size 8192, unigram 0.8 % fewer at 4096."""
    character_coverage: Annotated[float, Field(gt=0, le=1)] = 0.9995
    """Share of characters that the vocab covers; the rest are split into bytes."""
    byte_fallback: bool = True
    """Splits characters outside the vocabulary into bytes instead of losing them."""
    normalization: Literal["identity", "nfkc", "nmt_nfkc", "nmt_nfkc_cf"] = "identity"
    """With "identity" and byte_fallback, decoding reproduces the text exactly, except that "▁"
    (U+2581) becomes a space."""
    train_lines: Count = 1_000_000
    """Maximum number of lines to train on, chosen at random but always the same."""
    model_file: str | None = None
    """A trained SentencePiece model to use unchanged, with the same IDs."""

    package = "sentencepiece"
    path_setting = "model_file"

    @property
    def trained_size(self) -> int | None:
        return self.size if self.model_file is None else None

    def given(self) -> Vocab | None:
        if self.model_file is None:
            return None
        return SentencePieceVocab(read_model(self.model_file), self.model_file)

    def train(self, lines: Iterator[str], words: Sequence[str]) -> Vocab:
        model, errors = io.BytesIO(), list[Exception]()

        def checked() -> Iterator[str]:
            """Logs how many lines SentencePiece leaves out; keeps an error that a corpus raises."""
            left_out = 0
            try:
                for line in lines:
                    # A character has at most four bytes: few lines must be encoded to measure them.
                    if len(line) * 4 > _LONGEST_LINE_BYTES:
                        left_out += len(line.encode()) > _LONGEST_LINE_BYTES
                    yield line
            except Exception as error:  # which SentencePiece would replace with its own
                errors.append(error)
                raise
            if left_out:
                logger.warning(
                    "The vocab is trained without %d lines of more than %d bytes.",
                    left_out, _LONGEST_LINE_BYTES,
                )  # fmt: skip

        sentencepiece.set_random_generator_seed(0)
        sentencepiece.set_min_log_level(2)
        try:
            sentencepiece.SentencePieceTrainer.train(
                # SentencePiece's own sample differs between processes, whatever the seed.
                sentence_iterator=_sampled(checked(), self.train_lines),
                model_writer=model,
                vocab_size=self.size,
                model_type=self.model_type,
                character_coverage=self.character_coverage,
                byte_fallback=self.byte_fallback,
                normalization_rule_name=self.normalization,
                remove_extra_whitespaces=self.normalization != "identity",
                input_sentence_size=self.train_lines,
                shuffle_input_sentence=True,
                max_sentence_length=_LONGEST_LINE_BYTES,
                # Fixed: the sums of unigram training depend on how threads share the lines.
                num_threads=4,
                user_defined_symbols=[word if word.isspace() else "▁" + word for word in words],
                pad_id=PAD,
                eos_id=EOS,
                unk_id=UNK,
                bos_id=-1,
            )
        except RuntimeError as error:
            if errors:
                raise errors[0] from None
            raise UserError(_explain(self, str(error))) from None
        trim_memory()  # 0.9 GB after a million lines
        return SentencePieceVocab(model.getvalue())


class SentencePieceVocab(Vocab):
    """Maps text to ids and back with a SentencePiece model."""

    def __init__(self, model: bytes, name: str = "a SentencePiece model"):
        processor = processor_of(model)
        if processor is None:
            raise UserError(
                f"vocab {name}: is not a SentencePiece model.  (Hugging Face's tokenizer.json is "
                "read by @TokenizerJson().)"
            )
        ids = range(processor.vocab_size())
        pad, begin, end = processor.pad_id(), processor.bos_id(), processor.eos_id()
        if end < 0:
            raise UserError(
                f"vocab {name}: no id ends a text (its eos_id is {end}).  Train it with "
                f"--pad_id={PAD} --eos_id={EOS} --unk_id={UNK} --bos_id=-1."
            )
        # T5's models, like those trained here, have no begin token: a decoder reads padding first.
        begin = next(i for i in (begin, pad, end) if i >= 0)
        pad_id = pad if pad >= 0 else None
        super().__init__(model, len(ids), begin_id=begin, end_id=end, pad_id=pad_id)
        self._processor = processor

    @property
    def control_ids(self) -> list[int]:
        """Returns the ids that have no text."""
        processor = self._processor
        return [i for i in range(self.size) if processor.is_control(i) or processor.is_unknown(i)]

    def encode(self, lines: Sequence[str]) -> list[np.ndarray]:
        if len(lines) <= FEW_LINES:
            ids = [self._processor.encode(line) for line in lines]
        else:
            ids = self._processor.encode(list(lines), num_threads=thread_count())
        return [np.asarray(i, self.dtype) for i in ids]

    def _text(self, ids: list[int]) -> str:
        unknown = self._processor.unk_id()
        return str(self._processor.decode([i if i < self.size else unknown for i in ids]))

    def pieces(self, ids: Iterable[int]) -> list[str]:
        return [self._processor.id_to_piece(int(i)) if i < self.size else f"<{i}>" for i in ids]


def processor_of(model: bytes) -> sentencepiece.SentencePieceProcessor | None:
    """Loads a SentencePiece model; returns None if the bytes are not one."""
    try:
        processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        for i in range(processor.vocab_size()):
            processor.id_to_piece(i)  # the pieces of a damaged model are not all text
    except (RuntimeError, UnicodeDecodeError):
        return None
    return processor


def _sampled(lines: Iterator[str], count: int) -> Iterator[str]:
    """Yields at most `count` lines, at random but always the same (Vitter 1985, algorithm R)."""
    sample = list(itertools.islice(lines, count))
    draw = random.Random(0).random  # the same in every version of Python
    for number, line in enumerate(lines, count + 1):
        place = int(draw() * number)
        if place < count:
            sample[place] = line
    sample.reverse()
    while sample:  # frees each line once it is read
        yield sample.pop()


def _explain(settings: SentencePiece, error: str) -> str:
    setting = f"SentencePiece.size = {settings.size}"
    if largest := re.search(r"Vocabulary size too high.*<= (\d+)", error):
        return f"{setting}: this text yields at most {largest[1]} sub-words.  Set that or less."
    if smallest := re.search(r"required_chars\. \d+ vs (\d+)", error):
        return (
            f"{setting}: the characters of this text alone need {smallest[1]} sub-words.  Set this "
            "size or more, or a smaller SentencePiece.character_coverage."
        )
    if "sentences_.empty" in error:
        return "SentencePiece: there is no text to train on."
    return f"{setting}: SentencePiece cannot train on this text: {error}"
