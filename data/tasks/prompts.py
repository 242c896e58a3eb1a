"""Defines tasks of prompts and answers, of which a decoder learns the answers alone."""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from configs.errors import UserError
from configs.spec import spec
from data.packing.pair_rows import LONG
from data.packing.prompt_rows import PromptRows, packed_prompts
from data.packing.rows import Counts, Rows
from data.sources.clean import Clean
from data.sources.pairs import Pair, Pairs
from data.storage import CheckedArray
from data.task import PackChunk, PartOfText, Task, hashed_pairs, pair_of_line, rows_of_parts
from data.vocab import Tokenizer
from data.vocabs import Vocabs

PROMPT = "{prompt}"


@spec
class PromptTask(Task):
    """Defines a task of pairs, for a decoder that reads the source and predicts the target.

    Both stand in one row, one behind the other; the loss is that of the target and of its end.
    """

    source: Pairs
    """Where the text comes from: prompts and answers."""
    vocab: Tokenizer
    """How both are tokenized."""
    template: str = "{prompt}\n"
    """What stands before an answer, in training and in decoding: {prompt} is the prompt."""
    clean: Clean = Clean()
    """Which training pairs are dropped, beside those that are longer than a row."""
    word_list: None = None
    """A model reads every word."""

    takes_pairs = True

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

    def prompt(self, line: str) -> str:
        """Returns what a model reads before it answers."""
        return self.template.replace(PROMPT, line)

    def lines(self, split: str) -> Iterator[str]:
        """Yields the raw text of a split, a pair a line."""
        return self.source.lines(split, self.clean.errors)

    def vocab_text(self, name: str) -> Iterator[str]:
        """Yields what a vocab is trained on."""
        for part in self.source.parts_of("train").values():
            pairs = part.read("train", self.clean.errors)
            for source, target in self.clean.kept(pairs, "train", Counter()):
                yield from (self.prompt(source), target)

    # Rows

    @property
    def array_lengths(self) -> dict[str, int]:
        """Names the arrays of a batch, each with its length in a row."""
        return {**super().array_lengths, "loss_mask_BL": self.length}

    def pack_lines(
        self, lines: Sequence[str], vocabs: Vocabs, tag: str | None
    ) -> tuple[Rows, Sequence[str]]:
        """Packs lines in memory, each a prompt, a tab and its answer, which a model predicts."""
        pairs = [pair_of_line(number, line, tag) for number, line in enumerate(lines, 1)]
        arrays, pieces, counts = self._packed(pairs, vocabs)
        targets_BL, segments_BL, loss_mask_BL = (arrays[name] for name in self.columns(vocabs))
        rows = PromptRows(
            targets_BL, segments_BL, loss_mask_BL, counts, pieces,
            begin_id=vocabs.target.begin_id, reads_begin=vocabs.target.reads_begin,
        )  # fmt: skip
        return rows, [pair.target for pair in pairs]

    def columns(self, vocabs: Vocabs) -> dict[str, tuple[int, type]]:
        """Names the arrays of a split's rows in the cache, each with its columns and its type."""
        return {**super().columns(vocabs), "loss_mask": (self.length, np.uint8)}

    def parts_of_text(self, split: str, digest: "hashlib._Hash") -> Iterator[PartOfText]:
        """Yields the parts of a split, one after another; digest is fed the raw text."""
        for name, source in self.source.parts_of(split).items():
            dropped = Counter[str]()
            pairs = hashed_pairs(source.read(split, self.clean.errors), digest)
            yield PartOfText(name, self.clean.kept(pairs, split, dropped), dropped)

    def chunk_packer(self, vocabs: Vocabs) -> PackChunk:
        """Returns what packs the examples of a chunk, each chunk by itself."""

        def pack(pairs: Sequence[Pair], tag: str | None) -> tuple[dict[str, np.ndarray], Counts]:
            arrays, _, counts = self._packed(pairs, vocabs)
            return arrays, counts

        return pack

    def _packed(
        self, pairs: Sequence[Pair], vocabs: Vocabs
    ) -> tuple[dict[str, np.ndarray], np.ndarray, Counts]:
        prompted = [Pair(self.prompt(pair.source), pair.target) for pair in pairs]
        return packed_prompts(prompted, vocabs.target, self.length, packs=self.packs)

    def part_entries(
        self, dropped: Mapping[str, int], parts: Sequence[Mapping[str, Any]]
    ) -> dict[str, Any]:
        """Returns what a manifest keeps of the parts of a split."""
        return {"dropped": dict(dropped), "parts": list(parts)}

    def cached_rows(
        self,
        split: str,
        entry: Mapping[str, Any],
        array: Callable[[str], CheckedArray],
        vocabs: Vocabs,
    ) -> PromptRows:
        """Returns the rows of a split from its arrays and its entry in the manifest."""
        parts = list(rows_of_parts(entry["parts"], LONG))
        sizes = [part.counts.rows for part in parts]
        return PromptRows(
            array("targets"),
            array("segments"),
            array("loss_mask"),
            Counts.read(entry),
            mix=self.source.mix(sizes) if split == "train" else None,
            parts=parts,
            begin_id=vocabs.target.begin_id,
            reads_begin=vocabs.target.reads_begin,
        )

    def fills(self, counts: Counts) -> dict[str, float]:
        """Returns the share of places in the rows that hold a token."""
        return {"fill": (counts.tokens + counts.source_tokens) / (counts.rows * self.length)}

    def summary(self, counts: Counts) -> str:
        """Describes the rows of a split in a line."""
        return (
            f"{counts.lines:,} prompts of {counts.source_tokens:,} tokens with answers of "
            f"{counts.words:,} words, {counts.tokens:,} tokens, in {counts.rows:,} rows of "
            f"{self.length}, {self.fills(counts)['fill']:.1%} full; {counts.left_out:,} longer "
            "than a row"
        )
