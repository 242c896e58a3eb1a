"""Defines span corruption, T5's task for plain text (Raffel et al. 2020, section 3.1.4)."""

import dataclasses
import itertools
import zlib
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from configs.errors import UserError
from configs.spec import Count, spec
from data.packing import pack
from data.packing.rows import Counts, Rows
from data.sources.text_files import without_carriage_return
from data.task import Length, PackChunk
from data.tasks.pairs import EncoderTask
from data.vocab import Vocab
from data.vocabs import Vocabs

SENTINELS = tuple(f"<extra_id_{i}>" for i in range(100))


@spec
class SpanCorruption(EncoderTask):
    """Defines a T5-style task of text for an encoder-decoder: sentinels replace spans of the
    source, and the target contains the spans.

    An example is cut into pieces that fill the source and the target of a row.  Which spans of a
    piece are replaced depends only on its tokens.
    """

    length: Length = 114
    """Target tokens per row."""
    source_length: Length = 512
    """Source tokens per row."""
    noise_density: Annotated[float, Field(gt=0, lt=1)] = 0.15
    """Share of tokens to replace."""
    mean_noise_span_length: Annotated[float, Field(ge=1)] = 3.0
    """Average number of tokens per span."""
    draws: Count = 1
    """Number of copies of the training text in the rows, each with different spans replaced."""
    word_list: None = None
    """Not available for span corruption."""

    left_out = ("has a sentinel",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.fits(2):
            raise UserError(
                f"SpanCorruption.length = {self.length}, source_length = {self.source_length}: no "
                "piece of two tokens fits.  Legal: at least 3 each."
            )

    def make_vocabs(self, given: Vocabs | None) -> Vocabs:
        vocab = super().make_vocabs(given).target
        self.sentinels_of(vocab)
        return Vocabs(vocab, vocab)

    @property
    def vocab_words(self) -> Sequence[str]:
        return [*super().vocab_words, *SENTINELS]

    def sentinels_of(self, vocab: Vocab) -> np.ndarray:
        """Returns the token of each sentinel, without a token of a space that may precede it."""
        ids = [tokens[-1] for tokens in vocab.encode(SENTINELS)]
        pieces = zip(vocab.pieces(ids), SENTINELS, strict=True)
        if not all(piece.endswith(sentinel) for piece, sentinel in pieces):
            raise UserError(
                f"{self.name}: its vocab lacks {SENTINELS[0]} to {SENTINELS[-1]}.  Let the task "
                "train one, or use the tokenizer.json of a T5; its spiece.model has none."
            )
        return np.array(ids)

    def chunk_packer(self, vocabs: Vocabs) -> PackChunk:
        return lambda lines, tag, training: self.packed(
            lines, vocabs.target, self.draws if training else 1
        )

    def rows_of_text(self, lines: Iterable[str], vocabs: Vocabs) -> Rows:
        packed, counts = self.packed([*lines], vocabs.target, 1)
        return self.rows(packed.arrays, counts, vocabs, pieces=packed.pieces)

    def pack_lines(
        self, lines: Sequence[str], vocabs: Vocabs, tag: str | None
    ) -> tuple[Rows, Sequence[str]]:
        raise UserError(
            f"{self.name}: @SpanCorruption() cannot score a line: the model predicts only some "
            "spans of it.  `meshloom evaluate` computes the loss of a text."
        )

    def packed(self, lines: Sequence[str], vocab: Vocab, draws: int) -> tuple[pack.Packed, Counts]:
        """Encodes, corrupts and packs lines."""
        sentinels = self.sentinels_of(vocab)
        longest = next(n for n in itertools.count(2) if not self.fits(n + 1))
        encoded = vocab.encode([without_carriage_return(line) for line in lines])
        # A sentinel in the text would look like one of the task's.
        kept = [n for n, tokens in enumerate(encoded) if not np.isin(tokens, sentinels).any()]
        pieces: list[tuple[Any, ...]] = [
            (number, *self.corrupted(tokens[start : start + longest], sentinels, draw))
            for number, tokens in ((number, encoded[number]) for number in kept)
            for start in range(0, len(tokens), longest)
            for draw in range(draws)
        ]
        numbers, sources, targets = ([piece[i] for piece in pieces] for i in range(3))
        lengths = self.length, self.source_length
        sides = (pack.Side(length, vocab.dtype, vocab.end_id) for length in lengths)
        packer = pack.Packer(*sides, packs=self.packs)
        packer.add(targets, sources)
        packed = packer.finish()
        packed.pieces[:, 0] = np.array(numbers, np.int64)[packed.pieces[:, 0]]
        counts = dataclasses.replace(
            Counts.of([self.text_of(target, sentinels, vocab) for target in targets]),
            lines=len(kept),
            left_out=len(lines) - len(kept),
            tokens=sum(map(len, targets)) + len(targets),
            rows=packed.rows,
            source_tokens=sum(map(len, sources)) + len(sources),
        )
        return packed, counts

    def text_of(self, target: np.ndarray, sentinels: np.ndarray, vocab: Vocab) -> str:
        """Returns the text of a target's spans, whose words and bytes are counted."""
        spans = np.split(target, np.flatnonzero(np.isin(target, sentinels)))
        return " ".join(vocab.decode(span[1:]).strip() for span in spans[1:])

    def spans(self, tokens: int) -> tuple[int, int]:
        """Returns how many tokens are replaced, in how many spans, in a piece of this length."""
        replaced = min(max(round(tokens * self.noise_density), 1), max(tokens - 1, 1))
        spans = max(round(replaced / self.mean_noise_span_length), 1)
        return replaced, min(spans, max(tokens - replaced, 1))

    def fits(self, tokens: int) -> bool:
        """Returns whether the source and the target of a piece of this length fit into a row."""
        replaced, spans = self.spans(tokens)
        is_short = tokens - replaced + spans + 1 <= self.source_length
        return is_short and replaced + spans + 1 <= self.length and spans <= len(SENTINELS)

    def corrupted(
        self, tokens: np.ndarray, sentinels: np.ndarray, draw: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the source and the target of a piece, which begins with a span that is kept."""
        replaced, spans = self.spans(len(tokens))
        random = np.random.default_rng([zlib.crc32(tokens.astype(np.int64).tobytes()), draw])

        def sizes(total: int) -> np.ndarray:
            cuts = random.choice(max(total - 1, 0), spans - 1, replace=False) + 1
            return np.diff([0, *np.sort(cuts), total])

        ends = np.cumsum(np.stack([sizes(len(tokens) - replaced), sizes(replaced)], axis=1))
        parts, marks = np.split(tokens, ends[:-1]), sentinels[:spans, None]
        source = itertools.chain(*zip(parts[::2], marks, strict=True))
        target = itertools.chain(*zip(marks, parts[1::2], strict=True))
        return np.concatenate([*source]), np.concatenate([*target])
