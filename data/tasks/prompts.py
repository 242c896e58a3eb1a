"""Defines tasks of prompts and answers, of which a decoder learns the answers alone."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from configs.errors import UserError
from configs.spec import spec
from data.packing.pack import Packed
from data.packing.prompt_rows import PromptRows, packed_prompts
from data.packing.rows import Counts, RowArray, Rows
from data.sources.pairs import Pair, Pairs
from data.task import PackChunk
from data.tasks.pairs import PairTask
from data.vocab import Tokenizer
from data.vocabs import Vocabs

PROMPT = "{prompt}"


@spec
class PromptTask(PairTask):
    """Defines a task of pairs, for a decoder that reads the source and predicts the target.

    Both stand in one row, one behind the other; the loss is that of the target and of its end.
    """

    source: Pairs
    """Where the text comes from: prompts and answers."""
    vocab: Tokenizer
    """How both are tokenized."""
    template: str = "{prompt}\n"
    """What stands before an answer, in training and in decoding: {prompt} is the prompt."""

    rows_kind = PromptRows

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.template.count(PROMPT) != 1:
            raise UserError(
                f"PromptTask.template = {self.template!r}: found {PROMPT} "
                f"{self.template.count(PROMPT)} times.  Legal: once."
            )
        if self.source.tags:
            raise UserError(
                f"PromptTask.source: its tags ({', '.join(self.source.tags)}) are for encoders.  "
                "Unset them; what stands before each prompt is PromptTask.template."
            )

    @property
    def has_newlines(self) -> bool:
        """Returns whether what a model reads has newlines for certain, as of its template."""
        return "\n" in self.template

    @property
    def has_answers(self) -> bool:
        return True

    def prompt(self, line: str) -> str:
        """Returns what a model reads before it answers."""
        return self.template.replace(PROMPT, line)

    def pairs_of(self, part: Pairs, split: str) -> Iterator[Pair]:
        """Yields the pairs of one part of a split, which may have tabs and newlines."""
        return part.read_prompts(split, self.clean.errors)

    # Rows

    @property
    def array_lengths(self) -> dict[str, int]:
        return {**super().array_lengths, "loss_mask_BL": self.length}

    def columns(self, vocabs: Vocabs) -> dict[str, tuple[int, type]]:
        return {**super().columns(vocabs), "loss_mask": (self.length, np.uint8)}

    def chunk_packer(self, vocabs: Vocabs) -> PackChunk:

        def pack(pairs: Sequence[Pair], tag: str | None, training: bool) -> tuple[Packed, Counts]:
            prompted = [Pair(self.prompt(pair.source), pair.target) for pair in pairs]
            return packed_prompts(prompted, vocabs.target, self.length, packs=self.packs)

        return pack

    def rows(
        self, arrays: Mapping[str, RowArray], counts: Counts, vocabs: Vocabs, **known: Any
    ) -> Rows:
        known["reads_begin"] = vocabs.target.reads_begin
        return super().rows(arrays, counts, vocabs, **known)

    def fills(self, counts: Counts) -> dict[str, float]:
        return {"fill": (counts.tokens + counts.source_tokens) / (counts.rows * self.length)}

    def summary(self, counts: Counts) -> str:
        return (
            f"{counts.lines:,} prompts of {counts.source_tokens:,} tokens with answers of "
            f"{counts.words:,} words, {counts.tokens:,} tokens, in {counts.rows:,} rows of "
            f"{self.length}, {self.fills(counts)['fill']:.1%} full; {counts.left_out:,} longer "
            "than a row"
        )
