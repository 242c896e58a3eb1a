"""Skips merges of sub-words at random (BPE dropout: Provilkov et al. 2020, section 4).

SentencePiece's sampler skips other merges in each process, whatever its seed.  Rows of a cache
must follow from the settings and the text alone, so the merges are chosen here.
"""

import random
from collections.abc import Sequence

from sentencepiece import sentencepiece_model_pb2 as proto

from configs.errors import UserError

_SPACE = "▁"
_NORMAL = proto.ModelProto.SentencePiece.NORMAL


class BpeDropout:
    """Splits the pieces of a text again, by the merges of a SentencePiece model."""

    def __init__(self, model: bytes, rate: float, seed: int):
        parsed = proto.ModelProto.FromString(model)
        kind = proto.TrainerSpec.ModelType.Name(parsed.trainer_spec.model_type).lower()
        if kind != "bpe":
            raise UserError(f"BPE dropout: the model_type of the vocab is {kind}.  Legal: bpe.")
        self._rate = rate
        self._seed = seed
        normal = [(i, piece) for i, piece in enumerate(parsed.pieces) if piece.type == _NORMAL]
        self._ids = {piece.piece: i for i, piece in normal}
        self._pieces = {i: piece.piece for i, piece in normal}
        # Merges that come first have the highest score.
        self._order = {piece.piece: -piece.score for _, piece in normal if len(piece.piece) > 1}
        self._ends_at_spaces = not any(_SPACE in piece.piece[1:] for _, piece in normal)

    def __call__(self, line: str, ids: Sequence[int]) -> list[int]:
        """Returns other ids of a line; they follow from the line, its ids, the rate and seed."""
        generator = random.Random(f"{self._seed} {line}")
        sampled, symbols = list[int](), list[str]()

        def end_word() -> None:
            sampled.extend(self._ids[symbol] for symbol in self._merged(symbols, generator))
            symbols.clear()

        for i in ids:
            piece = self._pieces.get(i)
            if piece is None:  # a byte, an unknown character or a word that is never split
                end_word()
                sampled.append(i)
                continue
            if self._ends_at_spaces and piece.startswith(_SPACE):
                end_word()
            # A character that is not a piece cannot be split off.
            symbols.extend(piece if all(x in self._ids for x in piece) else [piece])
        end_word()
        return sampled

    def _merged(self, symbols: Sequence[str], generator: random.Random) -> list[str]:
        """Merges symbols as BPE does; each merge is skipped at the given rate at each step."""
        symbols = list(symbols)
        while True:
            merges = [
                (self._order[merge], i, merge)
                for i, merge in enumerate(map(str.__add__, symbols, symbols[1:]))
                if merge in self._order and generator.random() >= self._rate
            ]
            if not merges:
                return symbols
            _, i, merge = min(merges)
            symbols[i : i + 2] = [merge]
