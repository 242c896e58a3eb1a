"""Defines base classes for tasks of pairs, and for tasks of models with an encoder."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from configs.errors import UserError
from configs.spec import abstract_spec
from data.packing.pack import place_dtype
from data.packing.rows import Counts, PairRows, hashed_pair
from data.sources.clean import Clean
from data.sources.pairs import LANGUAGE, Pair, Pairs
from data.task import Digest, Length, PartOfText, Task, hashed
from data.vocabs import TARGET_FILE, Vocabs


@abstract_spec
class PairTask(Task):
    """Defines a task of pairs."""

    source: Pairs
    """Where the text comes from."""
    clean: Clean = Clean()
    """Which training pairs to drop, in addition to those longer than a row."""
    word_list: None = None
    """Not available for pairs."""

    takes_pairs = True
    left_out = ("longer than a row",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if bare := [tag for tag in self.source.tags if LANGUAGE in tag]:
            raise UserError(f"tag = {bare[0]!r}: only Mixture.languages replace {LANGUAGE}.")

    def pairs_of(self, part: Pairs, split: str) -> Iterator[Pair]:
        """Yields the pairs of one part of a split, as they are packed."""
        return part.untagged(split, self.clean.errors)

    def vocab_text(self, name: str) -> Iterator[str]:
        for part in self.source.parts_of("train").values():
            pairs = self.pairs_of(part, "train")
            for pair in self.clean.kept(pairs, "train", Counter()):
                if name != "target vocab":
                    yield self.prompt(pair.source)
                if name != "source vocab":
                    yield from pair[1:]

    def part_of_text(self, name: str, part: Pairs, split: str, digest: Digest) -> PartOfText:
        dropped = Counter[str]()
        pairs = hashed(self.pairs_of(part, split), digest, hashed_pair)
        return PartOfText(name, self.clean.kept(pairs, split, dropped), dropped, part.tag)

    def part_entries(
        self, dropped: Mapping[str, int], parts: Sequence[Mapping[str, Any]]
    ) -> dict[str, Any]:
        return {"dropped": dict(dropped), "parts": list(parts)}


@abstract_spec
class EncoderTask(Task):
    """Defines a task whose rows have a source, which an encoder reads, and a target."""

    source_length: Length
    """Source tokens per row."""

    rows_kind = PairRows

    @property
    def row_lengths(self) -> dict[str, int]:
        return {**super().row_lengths, "source_length": self.source_length}

    @property
    def array_lengths(self) -> dict[str, int]:
        names = ("inputs_BM", "segments_BM", "positions_BM")
        return {**dict.fromkeys(names, self.source_length), **super().array_lengths}

    @property
    def source_vocab_file(self) -> str:
        return TARGET_FILE

    def columns(self, vocabs: Vocabs) -> dict[str, tuple[int, type]]:
        return {
            **super().columns(vocabs),
            "sources": (self.source_length, vocabs.of_source.dtype),
            "source_segments": (self.source_length, place_dtype(self.source_length)),
        }

    def fills(self, counts: Counts) -> dict[str, float]:
        """Returns the share of positions in the rows that hold a token, on each side."""
        source_fill = counts.source_tokens / (counts.rows * self.source_length)
        return {**super().fills(counts), "source_fill": source_fill}
