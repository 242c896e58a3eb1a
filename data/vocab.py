"""Defines vocabs, which map text to ids and back, and the settings that make them."""

import abc
import dataclasses
import functools
import hashlib
import itertools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from configs.paths import path_of
from configs.spec import abstract_spec
from data.storage import lookup

# Ids of a vocab that is trained here; other vocabs keep their own.
PAD = 0  # also what a decoder reads before its first target
EOS = 1
UNK = 2
UNK_WORD = "<UNK>"  # what LM1B puts in place of a word outside the word list
_UNRELATED = "\ue000"  # a private-use character: no sub-word joins it with what follows

_thread_limit = 16


def cores() -> int:
    """Returns how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def limit_threads(threads: int) -> None:
    """Limits the threads of `Vocab.encode` in this process."""
    global _thread_limit
    _thread_limit = threads
    os.environ["RAYON_NUM_THREADS"] = str(threads)  # for tokenizers


def thread_count() -> int:
    """Returns the number of threads that tokenize."""
    return min(cores(), _thread_limit)


@dataclasses.dataclass(eq=False, repr=False)
class Vocab(abc.ABC):
    """Maps text to ids and back, and holds the ids that begin and end a text.

    Rows of a batch are padded with zeros, not with pad_id; segments mark the text.
    """

    model: bytes
    """Content of the vocab's file."""
    size: int
    """One more than the largest id."""
    _: dataclasses.KW_ONLY
    begin_id: int
    """The token that a decoder reads before the first token of a text."""
    end_id: int
    """The token that follows the last token of a text."""
    pad_id: int | None
    """The token without text; None if the vocab has none."""
    reads_begin: bool = True
    """Whether a decoder also reads begin_id before a prompt."""
    stop_ids: tuple[int, ...] = ()
    """Tokens at which decoding stops: the end of a text, and perhaps the end of a chat turn."""
    banned_ids: tuple[int, ...] = ()
    """Tokens that decoding never generates."""
    files: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """The Hugging Face files that the vocab was made from, unchanged."""

    def __post_init__(self) -> None:
        self.stop_ids = tuple(dict.fromkeys([self.end_id, *self.stop_ids]))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.model,)

    @functools.cached_property
    def hash(self) -> str:
        return hashlib.sha256(self.model).hexdigest()

    @property
    def ids_hash(self) -> str:
        """Returns a hash that is the same for vocabs whose ids can share one embedding."""
        return self.hash

    @property
    def special(self) -> dict[str, Any]:
        """Returns what a decoder must know about the vocab."""
        names = ("begin_id", "stop_ids", "reads_begin", "banned_ids")
        return {name: getattr(self, name) for name in names}

    @functools.cached_property
    def dtype(self) -> type[np.unsignedinteger]:
        """Returns the smallest dtype that holds every id."""
        return np.uint16 if self.size <= 1 << 16 else np.uint32

    @abc.abstractmethod
    def encode(self, lines: Sequence[str]) -> list[np.ndarray]:
        """Returns the ids of each text, without begin and end tokens."""

    def encode_continuation(self, text: str) -> np.ndarray:
        """Returns the ids of a text that continues another one, without what begins a text.

        SentencePiece puts a space before each text: `encode` turns " is" into ids of two spaces.
        """
        before, whole, alone = self.encode([_UNRELATED, _UNRELATED + text, text.strip()])
        rest = whole[len(before) :]
        is_apart = np.array_equal(whole[: len(before)], before) and (
            self.text(rest).split() == self.text(alone).split()  # else a word became unknown
        )
        return rest if is_apart else self.encode([text])[0]

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of ids up to the first end token."""
        return self.text(itertools.takewhile(lambda i: i != self.end_id, ids))

    def text(self, ids: Iterable[int]) -> str:
        """Returns the text of all ids, such as a chat with an end token after each turn.

        Padding has no text.  A model may have more embeddings than the vocab has ids: the ids
        beyond are unknown.
        """
        return self._text([int(i) for i in ids if i != self.pad_id])

    @abc.abstractmethod
    def _text(self, ids: list[int]) -> str:
        """Returns the text of ids, some of which may be unknown."""

    @abc.abstractmethod
    def pieces(self, ids: Iterable[int]) -> list[str]:
        """Returns the sub-words as the vocab writes them."""


def read_model(path: str | os.PathLike[str]) -> bytes:
    """Reads the file of a vocab."""
    return lookup.read_bytes(f"vocab {path}", path_of(path).expanduser())


@abstract_spec
class Tokenizer:
    """Sets how text is tokenized; a task file names one of its kinds."""

    package: ClassVar[str | None] = None
    """The package that tokenizes, if any: another version may give other tokens."""

    path_setting: ClassVar[str] = "path"
    """The parameter that names a trained vocab, if any."""

    @property
    def given_path(self) -> str | None:
        """Returns the path of the trained vocab to use; None if the task trains one."""
        return getattr(self, self.path_setting, None)

    def given(self) -> Vocab | None:
        """Loads the trained vocab to use; None if the task trains one."""
        return None

    @property
    def trained_size(self) -> int | None:
        """Returns the size of the vocab that the task trains; None if a vocab is given."""
        return None

    def train(self, lines: Iterator[str], words: Sequence[str]) -> Vocab:
        """Trains a vocab on some lines; each of `words` becomes one sub-word."""
        raise NotImplementedError(f"{type(self).__name__} has no train")


def make(settings: Tokenizer, lines: Iterator[str], *, words: Sequence[str] = ()) -> Vocab:
    """Loads or trains the vocab that the settings describe; the same text gives the same vocab.

    Each of `words` becomes one sub-word between spaces; a newline does so anywhere.
    """
    return settings.given() or settings.train(lines, words)
