"""Defines tasks of translation, for models with an encoder."""

from collections.abc import Sequence

import numpy as np

from configs.errors import UserError
from configs.spec import Count, Fraction, spec
from data.packing.pack import Packed, joined, place_dtype
from data.packing.pair_rows import PairRows, packed_pairs
from data.packing.rows import Counts
from data.sources.pairs import Pair, tag_word
from data.task import Length, PackChunk, PairsOfPart
from data.tasks.pairs import PairTask
from data.vocab import Tokenizer, Vocab
from data.vocabs import SOURCE_FILE, TARGET_FILE, Vocabs


@spec
class Translation(PairTask):
    """Defines a task of pairs, for a model that translates the source into the target."""

    vocab: Tokenizer
    """How the target is tokenized; if source_vocab is None, both sides, and it is trained on
    both."""
    source_vocab: Tokenizer | None = None
    """A vocabulary only for the source. None: both sides share one."""
    length: Length
    """Target tokens per row."""
    source_length: Length
    """Source tokens per row. A pair that is longer than a row on either side is dropped."""
    bpe_dropout: Fraction = 0.0
    """Share of the merges of sub-words that are skipped at random in the training pairs, which
    SentencePiece's vocabularies by BPE allow (Provilkov et al., 2020)."""
    segmentations: Count = 1
    """Times that each training pair is in the rows, with other merges skipped each time."""

    rows_kind = PairRows

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.segmentations > 1 and not self.bpe_dropout:
            raise UserError(
                f"Translation.segmentations = {self.segmentations}: all would be equal.  Set "
                "Translation.bpe_dropout, such as to 0.1, or remove the line."
            )
        for tokenizer in self.vocab_settings.values():
            if self.bpe_dropout and not tokenizer.may_drop_merges:
                raise UserError(
                    f"Translation.bpe_dropout = {self.bpe_dropout}: @{type(tokenizer).__name__}() "
                    'has no merges to skip.  Set SentencePiece.model_type = "bpe", or remove the '
                    "line."
                )

    @property
    def row_lengths(self) -> dict[str, int]:
        return {**super().row_lengths, "source_length": self.source_length}

    @property
    def array_lengths(self) -> dict[str, int]:
        names = ("inputs_BM", "segments_BM", "positions_BM")
        return {**dict.fromkeys(names, self.source_length), **super().array_lengths}

    @property
    def tags(self) -> tuple[str, ...]:
        return self.source.tags

    def test_pairs(self, split: str) -> list[PairsOfPart]:
        return [
            PairsOfPart(name, part.tag, list(self.pairs_of(part, split)))
            for name, part in self.source.parts_of(split).items()
        ]

    @property
    def source_vocab_file(self) -> str:
        return TARGET_FILE if self.source_vocab is None else SOURCE_FILE

    @property
    def vocab_settings(self) -> dict[str, Tokenizer]:
        source_settings = {} if self.source_vocab is None else {SOURCE_FILE: self.source_vocab}
        return {**super().vocab_settings, **source_settings}

    def make_vocabs(self, vocab: Vocab | None, source_vocab: Vocab | None) -> Vocabs:
        tags = list(dict.fromkeys(map(tag_word, self.tags)))
        if self.source_vocab is None:
            source = target = vocab or self._make_vocab(self.vocab, "vocab", tags)
        else:
            source = source_vocab or self._make_vocab(self.source_vocab, "source vocab", tags)
            target = vocab or self._make_vocab(self.vocab, "target vocab", [])
        for tag in tags:
            [ids] = source.encode([tag])
            if len(ids) != 1:
                raise UserError(
                    f"{self.name}: its source vocab splits {tag} into {len(ids)} sub-words, but a "
                    "tag must be one.  Use a vocab that was trained with it, or let the task train "
                    "one."
                )
        vocabs = Vocabs(target, source)
        if self.bpe_dropout:
            vocabs.with_dropout(self.bpe_dropout, seed=0)  # raises where a vocab cannot do it
        return vocabs

    def columns(self, vocabs: Vocabs) -> dict[str, tuple[int, type]]:
        return {
            **super().columns(vocabs),
            "sources": (self.source_length, vocabs.of_source.dtype),
            "source_segments": (self.source_length, place_dtype(self.source_length)),
        }

    def chunk_packer(self, vocabs: Vocabs) -> PackChunk:
        sampled = [vocabs]
        if self.bpe_dropout:
            seeds = range(self.segmentations)
            sampled = [vocabs.with_dropout(self.bpe_dropout, seed) for seed in seeds]

        def pack(pairs: Sequence[Pair], tag: str | None, training: bool) -> tuple[Packed, Counts]:
            lengths = self.length, self.source_length
            rows = [
                packed_pairs(pairs, sides, lengths, self.packs, tag)
                for sides in (sampled if training else [vocabs])
            ]
            packed, counts = zip(*rows, strict=True)
            before = np.cumsum([0, *(one.rows for one in packed)])
            moved = [
                Packed(one.arrays, one.pieces + np.array([0, first, 0]))
                for one, first in zip(packed, before, strict=False)
            ]
            return joined(moved), sum((c.as_repeats() for c in counts[1:]), counts[0])

        return pack

    def fills(self, counts: Counts) -> dict[str, float]:
        """Returns the share of slots in the rows that hold a token, on each side."""
        source_fill = counts.source_tokens / (counts.rows * self.source_length)
        return {**super().fills(counts), "source_fill": source_fill}

    def summary(self, counts: Counts) -> str:
        fills = self.fills(counts)
        return (
            f"{counts.lines:,} pairs, {counts.source_words:,} and {counts.words:,} words, "
            f"{counts.source_tokens:,} and {counts.tokens:,} tokens in {counts.rows:,} rows of "
            f"{self.source_length} and {self.length}, {fills['source_fill']:.1%} and "
            f"{fills['fill']:.1%} full"
        )
