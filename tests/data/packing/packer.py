"""What tests pack with."""

from collections.abc import Sequence

import numpy as np

from data.packing import pack

EXAMPLES_PER_CHUNK = 16_384


def pack_at_once(
    targets: Sequence[np.ndarray],
    length: int,
    sources: Sequence[np.ndarray] | None = None,
    source_length: int | None = None,
    *,
    packs: bool = True,
) -> pack.Packed:
    """Packs all examples at once; each gets an EOS, and of a pair both halves."""
    sides = (
        [pack.Side(length)]
        if source_length is None
        else [pack.Side(length), pack.Side(source_length)]
    )
    halves = [targets] if sources is None else [targets, sources]
    packer = pack.Packer(*sides, packs=packs)
    starts = range(0, len(targets), EXAMPLES_PER_CHUNK)
    for i in starts:
        packer.add(*(half[i : i + EXAMPLES_PER_CHUNK] for half in halves))
    return packer.finish()
