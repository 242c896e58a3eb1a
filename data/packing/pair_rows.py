"""Holds packed rows of pairs: what the decoder reads, as in any rows, and the encoder's sources."""

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

from data.packing import pack
from data.packing.rows import Counts, Rows, chunks, read_rows
from data.sources.pairs import Pair, tagged
from data.vocabs import Vocabs

LONG = "longer than a row"


class PairRows(Rows):
    """Holds the rows of one split of a translation; those of a mixture follow part after part."""

    def batch(self, row_ids: np.ndarray) -> dict[str, np.ndarray]:
        arrays = self.arrays["sources"], self.arrays["source_segments"]
        sources_BM, segments_BM = read_rows(row_ids, *arrays)
        return {
            "inputs_BM": sources_BM.astype(np.int32),
            "segments_BM": segments_BM.astype(np.int32),
            "positions_BM": pack.positions(segments_BM),
            **super().batch(row_ids),
        }


def packed_pairs(
    pairs: Iterable[Pair], vocabs: Vocabs, lengths: Sequence[int], packs: bool, tag: str | None
) -> tuple[pack.Packed, Counts]:
    """Encodes and packs pairs chunk by chunk, each source with the tag in front.

    `lengths` are those of targets and of sources; a pair that is longer than a row has no piece.
    """
    sides = (vocabs.target, vocabs.of_source)
    packer = pack.Packer(
        *(pack.Side(n, v.dtype, v.end_id) for n, v in zip(lengths, sides, strict=True)), packs=packs
    )
    counts = Counts()
    for chunk in chunks(pairs):
        sources = vocabs.of_source.encode([tagged(pair.source, tag) for pair in chunk])
        targets = vocabs.target.encode([pair.target for pair in chunk])
        kept = np.flatnonzero(packer.fits(targets, sources))
        packer.add(targets, sources)
        counts += Counts.of_pairs(
            [chunk[i] for i in kept],
            tokens=sum(len(targets[i]) + 1 for i in kept),
            source_tokens=sum(len(sources[i]) + 1 for i in kept),
            left_out=len(chunk) - len(kept),
        )
    packed = packer.finish()
    return packed, dataclasses.replace(counts, rows=packed.rows)
