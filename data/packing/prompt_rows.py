"""Holds packed rows of prompts and answers: the loss is that of the answers alone."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from data.packing.pack import Packed, Packer, Side, inputs, joined
from data.packing.rows import Counts, RowArray, Rows, read_rows
from data.sources.pairs import Pair
from data.vocab import Vocab


@dataclasses.dataclass(frozen=True, eq=False)
class PromptRows(Rows):
    """Holds the rows of one split; a mask marks the tokens of answers."""

    reads_begin: bool = True
    """Whether a decoder reads begin_id before a prompt, or the prompt alone."""

    @property
    def loss_mask_BL(self) -> RowArray:
        return self.arrays["loss_mask"]

    @property
    def counted_BL(self) -> np.ndarray:
        return self._counted(self.loss_mask_BL)

    @property
    def fill(self) -> float:
        """Returns the share of slots that hold a token of a prompt or of an answer."""
        return (self.counts.tokens + self.counts.source_tokens) / max(1, self.targets_BL.size)

    def batch(self, row_ids: np.ndarray) -> dict[str, np.ndarray]:
        (loss_mask_BL,) = read_rows(row_ids, self.loss_mask_BL)
        batch = {**super().batch(row_ids), "loss_mask_BL": loss_mask_BL.astype(np.int32)}
        return batch if self.reads_begin else without_begin(batch)


def without_begin(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns rows in which each text is read from its first token on, which nothing predicts."""
    segments_BL = batch["segments_BL"]
    moved = {  # by one to the left inside each segment, which then ends with 0
        name: inputs(batch[name][:, ::-1], segments_BL[:, ::-1])[:, ::-1]
        for name in ("targets_BL", "loss_mask_BL")
    }
    return {**batch, **moved, "inputs_BL": batch["targets_BL"]}


def packed_prompts(
    pairs: Sequence[Pair], vocab: Vocab, length: int, *, packs: bool
) -> tuple[Packed, Counts]:
    """Packs pairs, each a prompt and right behind it the answer, without those that do not fit."""
    prompts = vocab.encode([pair.source for pair in pairs])
    answers = vocab.encode([pair.target for pair in pairs])
    sizes = zip(prompts, answers, strict=True)
    kept = [i for i, (prompt, answer) in enumerate(sizes) if len(prompt) + len(answer) < length]
    # A packer has one array of tokens: those of prompts are negative there.
    signed = [np.r_[-1 - prompts[i].astype(np.int32), answers[i].astype(np.int32)] for i in kept]
    packer = Packer(Side(length, np.int32, vocab.end_id), packs=packs)
    packed = joined([*([packer.add(signed)] if signed else []), packer.finish()])
    signed_BL, segments_BL = packed.arrays["targets"], packed.arrays["segments"]
    targets_BL = np.where(signed_BL < 0, -1 - signed_BL, signed_BL)
    arrays = {
        "targets": targets_BL.astype(vocab.dtype),
        "segments": segments_BL,
        "loss_mask": ((signed_BL >= 0) & (segments_BL > 0)).astype(np.uint8),
    }
    pieces = packed.pieces.copy()
    pieces[:, 0] = np.array(kept, np.int64)[pieces[:, 0]]
    # Without a beginning, nothing predicts the first token behind an empty prompt.
    read_only = 0 if vocab.reads_begin else sum(not len(prompts[i]) for i in kept)
    of_prompts = Counts.of([pairs[i].source for i in kept])
    counts = dataclasses.replace(
        Counts.of([pairs[i].target for i in kept]),
        tokens=sum(len(answers[i]) + 1 for i in kept) - read_only,
        rows=packed.rows,
        source_words=of_prompts.words,
        source_bytes=of_prompts.bytes,
        source_tokens=sum(len(prompts[i]) for i in kept) + read_only,
        left_out=len(pairs) - len(kept),
    )
    return Packed(arrays, pieces), counts
