"""Defines a vocab of the labels of examples, in which each label is one token."""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from configs.errors import UserError, did_you_mean
from configs.spec import spec
from data.sources.text_files import decoded
from data.vocab import Tokenizer, Vocab

FORMAT = "meshloom labels 1\n"
"""What the file of a vocab of labels begins with."""


@spec
class Labels(Tokenizer):
    """Builds a vocab from all labels of the training examples, sorted."""

    def train(self, lines: Iterator[str], words: Sequence[str]) -> Vocab:
        return LabelVocab((FORMAT + "\n".join(sorted({*lines, *words}))).encode())


class LabelVocab(Vocab):
    """Maps each label to one id."""

    def __init__(self, model: bytes, name: str = "of labels"):
        labels = decoded(model, f"vocab {name}").removeprefix(FORMAT).split("\n")
        super().__init__(model, len(labels), begin_id=0, end_id=len(labels), pad_id=None)
        self.labels = labels
        self._ids = {label: i for i, label in enumerate(labels)}

    def encode(self, lines: Sequence[str]) -> list[np.ndarray]:
        for line in lines:
            if line not in self._ids:
                legal = ", ".join(self.labels[:40])
                legal += f" and {self.size - 40} more" if self.size > 40 else ""
                raise UserError(
                    f"label {line[:40]!r}: it does not occur in the training "
                    f"examples.{did_you_mean(line, self.labels)}  Legal: {legal}."
                )
        return [np.array([self._ids[line]], self.dtype) for line in lines]

    def _text(self, ids: list[int]) -> str:
        return " ".join(self.pieces(ids))

    def pieces(self, ids: Iterable[int]) -> list[str]:
        return [self.labels[i] if i < self.size else "?" for i in map(int, ids)]
