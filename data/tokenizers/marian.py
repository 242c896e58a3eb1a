"""Reads and applies Marian vocabs: sub-words of SentencePiece with the ids of vocab.json."""

import base64
import dataclasses
import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from typing import Literal

import numpy as np
from pydantic import Base64Bytes

from configs.errors import UserError
from configs.json_reader import read_json
from configs.paths import path_of
from configs.spec import spec
from data.tokenizers.sentence_piece import processor_of
from data.vocab import Tokenizer, Vocab, read_model, thread_count

FORMAT = b"meshloom marian 1\n"
"""What the file of such a vocab begins with."""
IDS, PIECES = "vocab.json", {"source": "source.spm", "target": "target.spm"}
_PAD, _END, _UNKNOWN = SPECIAL = ("<pad>", "</s>", "<unk>")
Side = Literal["source", "target"]
_TAG = re.compile(r">>.*?<<")


@spec
class Marian(Tokenizer):
    """Uses one side of the vocab of a Hugging Face Marian model, with the same IDs."""

    path: str
    """Folder with vocab.json, source.spm and target.spm, or the vocab file of a model directory."""
    side: Side = "target"
    """Which of the two SentencePiece models tokenizes text."""

    package = "sentencepiece"

    def given(self) -> Vocab:
        folder = path_of(self.path).expanduser()
        if not folder.is_dir():
            vocab = MarianVocab(read_model(folder), self.path)
            if vocab.side != self.side:
                raise UserError(f"Marian.side = {self.side!r}: {self.path} has {vocab.side} texts.")
            return vocab
        ids = read_json(read_model(folder / IDS), dict[str, int], folder / IDS)
        pieces = base64.b64encode(read_model(folder / PIECES[self.side])).decode()
        content = {"ids": ids, "pieces": pieces, "side": self.side}
        return MarianVocab(FORMAT + json.dumps(content, sort_keys=True).encode(), self.path)


@dataclasses.dataclass(frozen=True)
class _Content:
    ids: dict[str, int]
    pieces: Base64Bytes
    side: Side


class MarianVocab(Vocab):
    """Maps texts of one side to ids and back.

    A decoder reads <pad> first, and never generates it.  A text may begin with the tag of its
    target language, such as ">>deu<<".
    """

    def __init__(self, model: bytes, name: str = "of Marian"):
        if not model.startswith(FORMAT):
            raise UserError(f"vocab {name}: legal: a folder with {IDS} and {PIECES['source']}.")
        content = read_json(model.removeprefix(FORMAT), _Content, f"vocab {name}")
        self.ids, self.side = content.ids, content.side
        missing = [piece for piece in SPECIAL if piece not in self.ids]
        if missing or len({*self.ids.values()}) < len(self.ids) or min(self.ids.values()) < 0:
            problem = f"{missing[0]} is missing" if missing else "two tokens have the same id"
            raise UserError(f"vocab {name}: {IDS}: {problem}.")
        processor = processor_of(content.pieces)
        if processor is None:
            raise UserError(f"vocab {name}: its .spm files are not models of SentencePiece.")
        self._processor, self._by_id = processor, {i: piece for piece, i in self.ids.items()}
        size, pad, end = 1 + max(self._by_id), self.ids[_PAD], self.ids[_END]
        super().__init__(model, size, begin_id=pad, end_id=end, pad_id=pad, banned_ids=(pad,))

    @property
    def ids_hash(self) -> str:
        return hashlib.sha256(json.dumps(self.ids, sort_keys=True).encode()).hexdigest()

    def encode(self, lines: Sequence[str]) -> list[np.ndarray]:
        tags = [match[0] if (match := _TAG.match(line)) else "" for line in lines]
        texts = [line.removeprefix(tag) for line, tag in zip(lines, tags, strict=True)]
        pieces = self._processor.encode(texts, out_type=str, num_threads=thread_count())
        tagged = ([*([tag] if tag else []), *some] for tag, some in zip(tags, pieces, strict=True))
        unknown = self.ids[_UNKNOWN]
        return [np.array([self.ids.get(p, unknown) for p in some], self.dtype) for some in tagged]

    def _text(self, ids: list[int]) -> str:
        pieces = [piece for piece in self.pieces(ids) if piece not in SPECIAL]
        return str(self._processor.decode_pieces(pieces)).replace("▁", " ").strip()

    def pieces(self, ids: Iterable[int]) -> list[str]:
        return [self._by_id.get(int(i), _UNKNOWN) for i in ids]
