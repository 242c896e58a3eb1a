"""Holds the vocabs of a task: the target's, and the source's if there is one."""

import os
from pathlib import Path
from typing import NamedTuple

from data.tokenizers import labels, marian, tokenizer_json
from data.tokenizers.sentence_piece import SentencePieceVocab
from data.vocab import Vocab, read_model

TARGET_FILE, SOURCE_FILE = "vocab.model", "source_vocab.model"


def load_vocab(path: str | os.PathLike[str]) -> Vocab:
    """Loads any vocab that `Vocabs.save` wrote, or a SentencePiece model."""
    model = read_model(path)
    if model.startswith(labels.FORMAT.encode()):
        return labels.LabelVocab(model, str(path))
    if model.startswith(marian.FORMAT):
        return marian.MarianVocab(model, str(path))
    if tokenizer_json.is_bundle(model):
        return tokenizer_json.TokenizerJsonVocab(model, str(path))
    return SentencePieceVocab(model, str(path))


class Vocabs(NamedTuple):
    """Holds the vocabs of both sides, one object if shared.  Language models have no source."""

    target: Vocab
    source: Vocab | None

    @property
    def of_source(self) -> Vocab:
        assert self.source is not None, "only a translation has a source"
        return self.source

    def hashes(self) -> dict[str, str]:
        """Returns the hash of each vocab, as a manifest stores it."""
        hashes = {"vocab_hash": self.target.hash}
        return hashes if self.source is None else {**hashes, "source_vocab_hash": self.source.hash}

    def files(self) -> dict[str, bytes]:
        """Returns the content of the files that hold the vocabs, by file name."""
        files = {TARGET_FILE: self.target.model}
        if self.source is not None and self.source is not self.target:
            files[SOURCE_FILE] = self.source.model
        return files

    def save(self, folder: Path) -> None:
        for name, model in self.files().items():
            (folder / name).write_bytes(model)

    @classmethod
    def load(cls, folder: Path, source_file: str | None) -> "Vocabs":
        """Loads the vocabs that `save` wrote; source_file is the task's `source_vocab_file`."""
        target = load_vocab(folder / TARGET_FILE)
        if source_file is None:
            return cls(target, None)
        joint = source_file == TARGET_FILE
        return cls(target, target if joint else load_vocab(folder / source_file))
