"""Restricts the next token of a text so that the text can become JSON of a schema."""

import functools
import json
import re
from typing import Any

import llguidance
import numpy as np

from configs.errors import UserError, one_line
from data.tokenizers.sentence_piece import SentencePieceVocab
from data.tokenizers.tokenizer_json import TOKENIZER, TokenizerJsonVocab
from data.vocab import Vocab

LONGEST, DIGITS = 50_000, 4
"""Limits of a schema, so that it compiles quickly: characters, and digits of all its multipleOf."""


class Grammar:
    """Follows a text token by token; a `copy` follows another text."""

    def __init__(self, vocab: Vocab, schema: Any):
        self._vocab, text = vocab, json.dumps(schema)
        digits = len("".join(re.findall(r'"multipleOf": ([-+.e0-9]+)', text)))
        if len(text) > LONGEST or digits > DIGITS:
            raise UserError(
                f"a schema of {len(text):,} characters with {digits} digits in multipleOf.  Legal: "
                f"at most {LONGEST:,} and {DIGITS}."
            )
        # SentencePiece puts a space before most first tokens.
        lark = f'start: " "? json\njson: %json {text}'
        self._matcher = llguidance.LLMatcher(tokenizer_of(vocab), lark, log_level=0)
        if problem := self._matcher.get_error():
            raise UserError(" ".join(problem.split()))

    def copy(self) -> "Grammar":
        other = Grammar.__new__(Grammar)
        other._vocab, other._matcher = self._vocab, self._matcher.deep_copy()
        return other

    def allowed(self) -> np.ndarray | None:
        """Returns for each token of the vocabulary whether it may follow; None if none may.

        End tokens may follow as soon as the JSON is complete.
        """
        is_allowed = np.frombuffer(self._matcher.compute_logit_bias(), np.uint8) > 0
        is_allowed[[*self._vocab.stop_ids]] = self._matcher.is_accepting()
        return None if self._matcher.is_error() or not is_allowed.any() else is_allowed

    def add(self, token: int) -> None:
        """Adds a token that was allowed."""
        self._matcher.consume_token(token)


class _SentencePieces:
    """Describes the tokens of SentencePiece to llguidance."""

    bos_token_id = None

    def __init__(self, vocab: SentencePieceVocab):
        self._vocab, self.eos_token_id = vocab, vocab.end_id
        self.tokens = [bytes_of(piece) for piece in vocab.pieces(range(vocab.size))]
        self.special_token_ids = vocab.control_ids
        hidden = {*self.special_token_ids}
        self._ids = {text: i for i, text in enumerate(self.tokens) if i not in hidden}

    def __call__(self, text: bytes) -> list[int]:
        """Returns the tokens of bytes that continue a text."""
        ids: list[int] = self._vocab.encode_continuation(text.decode(errors="replace")).tolist()
        if b"".join(self.tokens[i] for i in ids) == text:
            return ids
        ids, start = [], 0
        while start < len(text):  # what the vocabulary would normalize
            ends = (end for end in range(len(text), start, -1) if text[start:end] in self._ids)
            if (end := next(ends, None)) is None:
                break
            ids.append(self._ids[text[start:end]])
            start = end
        return ids


def bytes_of(piece: str) -> bytes:
    """Returns the bytes that a piece of SentencePiece adds to a text: b" a" for "▁a"."""
    if len(piece) == 6 and piece.startswith("<0x"):
        return bytes([int(piece[3:5], 16)])
    return piece.replace("▁", " ").encode()


@functools.lru_cache(maxsize=2)
def tokenizer_of(vocab: Vocab) -> llguidance.LLTokenizer:
    """Describes a vocabulary to llguidance; raises if that is impossible."""
    kind = type(vocab).__name__
    try:
        if isinstance(vocab, TokenizerJsonVocab):
            return llguidance.LLTokenizer(vocab.files[TOKENIZER], vocab.size, vocab.end_id)
        if isinstance(vocab, SentencePieceVocab):
            return llguidance.LLTokenizer(llguidance.TokenizerWrapper(_SentencePieces(vocab)))
    except ValueError as error:
        kind += f" ({one_line(error)})"
    raise UserError(f"{kind} cannot restrict texts to a grammar.")
