"""Holds packed rows of pairs: what the decoder reads, as in any rows, and the encoder."""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from data.mixture import MixtureOrder
from data.packing import pack
from data.packing.rows import Counts, RowArray, Rows, RowsOfPart, chunks, read_rows
from data.sources.pairs import Pair, tagged
from data.vocab import PAD, Vocab

LONG = "longer than a row"


class PairRows(Rows):
    """Holds the rows of one split of a translation; those of a mixture lie part after part."""

    def __init__(
        self,
        targets_BL: RowArray,
        segments_BL: RowArray,
        sources_BM: RowArray,
        source_segments_BM: RowArray,
        counts: Counts,
        pieces: np.ndarray | None = None,
        mix: MixtureOrder | None = None,
        parts: Sequence[RowsOfPart] = (),
        begin_id: int = PAD,
    ):
        super().__init__(targets_BL, segments_BL, counts, pieces, mix, parts, begin_id)
        self.sources_BM = sources_BM
        self.source_segments_BM = source_segments_BM

    @property
    def source_length(self) -> int:
        return int(self.sources_BM.shape[1])

    @property
    def source_fill(self) -> float:
        """Returns the share of places on the source side that hold a token."""
        return self.counts.source_tokens / max(1, self.sources_BM.size)

    def numbers(self) -> dict[str, int | str]:
        """Returns what a table says about these rows."""
        counts = self.counts
        return {
            "pairs": counts.lines,
            "source words": counts.source_words,
            "words": counts.words,
            "source tokens": counts.source_tokens,
            "tokens": counts.tokens,
            "rows": counts.rows,
            "source fill": f"{self.source_fill:.1%}",
            "fill": f"{self.fill:.1%}",
        }

    def batch(self, row_ids: np.ndarray) -> dict[str, np.ndarray]:
        """Returns rows as int32 arrays; NO_ROW gives a row of padding."""
        sources_BM, segments_BM = read_rows(row_ids, self.sources_BM, self.source_segments_BM)
        return {
            "inputs_BM": sources_BM.astype(np.int32),
            "segments_BM": segments_BM.astype(np.int32),
            "positions_BM": pack.positions(segments_BM),
            **super().batch(row_ids),
        }

    @classmethod
    def from_pairs(
        cls,
        pairs: Iterable[Pair],
        source_vocab: Vocab,
        vocab: Vocab,
        source_length: int,
        length: int,
        *,
        packs: bool = True,
    ) -> "PairRows":
        """Packs pairs in memory; one that is longer than a row has no piece."""
        parts, counts = [], Counts()
        for packed, more in packed_pairs(
            pairs, source_vocab, vocab, source_length, length, packs=packs
        ):
            parts.append(packed)
            counts += more
        joined = pack.joined(parts)
        assert joined.sources_BM is not None and joined.source_segments_BM is not None
        return cls(
            joined.targets_BL,
            joined.segments_BL,
            joined.sources_BM,
            joined.source_segments_BM,
            counts,
            joined.pieces,
            begin_id=vocab.begin_id,
        )


def packed_pairs(
    pairs: Iterable[Pair],
    source_vocab: Vocab,
    vocab: Vocab,
    source_length: int,
    length: int,
    *,
    packs: bool,
    tag: str | None = None,
) -> Iterator[tuple[pack.Packed, Counts]]:
    """Encodes and packs pairs chunk by chunk, each source with the tag in front."""
    packer = pack.Packer(
        length, source_length, packs=packs, dtype=vocab.dtype, source_dtype=source_vocab.dtype,
        end_id=vocab.end_id, source_end_id=source_vocab.end_id,
    )  # fmt: skip
    for chunk in chunks(pairs):
        sources = source_vocab.encode([tagged(pair.source, tag) for pair in chunk])
        targets = vocab.encode([pair.target for pair in chunk])
        kept = np.flatnonzero(packer.fits(targets, sources))
        packed = packer.add(targets, sources)
        yield (
            packed,
            dataclasses.replace(
                _counts([chunk[i] for i in kept]),
                tokens=sum(len(targets[i]) + 1 for i in kept),
                source_tokens=sum(len(sources[i]) + 1 for i in kept),
                rows=len(packed),
                left_out=len(chunk) - len(kept),
            ),
        )
    packed = packer.finish()
    yield packed, Counts(rows=len(packed))


def _counts(pairs: Sequence[Pair]) -> Counts:
    sources, targets = (Counts.of([pair[side] for pair in pairs]) for side in (0, 1))
    return dataclasses.replace(targets, source_words=sources.words, source_bytes=sources.bytes)
