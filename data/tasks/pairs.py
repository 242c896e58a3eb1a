"""Defines tasks of pairs: what they have in common."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from configs.spec import abstract_spec
from data.packing.pair_rows import LONG
from data.packing.rows import hashed_pair
from data.sources.clean import Clean
from data.sources.pairs import Pair, Pairs
from data.task import Digest, PartOfText, Task, hashed


@abstract_spec
class PairTask(Task):
    """Defines a task of pairs."""

    source: Pairs
    """Where the text comes from."""
    clean: Clean = Clean()
    """Which training pairs are dropped, in addition to those longer than a row."""
    word_list: None = None
    """A model of pairs reads every word."""

    takes_pairs = True
    left_out = (LONG,)

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
