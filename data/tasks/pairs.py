"""Defines tasks of pairs: what they have in common."""

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from configs.errors import UserError
from configs.spec import abstract_spec
from data.packing.pair_rows import LONG
from data.packing.rows import Rows, hashed_pair
from data.sources.clean import Clean
from data.sources.pairs import Pair, Pairs, chosen_tag
from data.task import PartOfText, Task, hashed, hashed_parts
from data.vocabs import Vocabs


@abstract_spec
class PairTask(Task):
    """Defines a task of pairs."""

    source: Pairs
    """Where the text comes from."""
    clean: Clean = Clean()
    """Which training pairs are dropped, beside those that are longer than a row."""
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
            for source, target in self.clean.kept(pairs, "train", Counter()):
                if name != "target vocab":
                    yield self.prompt(source)
                if name != "source vocab":
                    yield target

    def parts_of_text(self, split: str, digest: "hashlib._Hash") -> Iterator[PartOfText]:
        for name, part in hashed_parts(self.source.parts_of(split), digest):
            dropped = Counter[str]()
            pairs = hashed(self.pairs_of(part, split), digest, hashed_pair)
            yield PartOfText(name, self.clean.kept(pairs, split, dropped), dropped, part.tag)

    def pack_lines(
        self, lines: Sequence[str], vocabs: Vocabs, tag: str | None
    ) -> tuple[Rows, Sequence[str]]:
        """Packs lines in memory, each a source, a tab and its target, which a model predicts."""
        return pack_pair_lines(self, lines, vocabs, tag)

    def part_entries(
        self, dropped: Mapping[str, int], parts: Sequence[Mapping[str, Any]]
    ) -> dict[str, Any]:
        return {"dropped": dict(dropped), "parts": list(parts)}


def pack_pair_lines(
    task: Task, lines: Sequence[str], vocabs: Vocabs, tag: str | None
) -> tuple[Rows, Sequence[str]]:
    """Packs pairs in memory, a tab between both halves; returns the rows and the targets."""
    pairs = []
    for number, line in enumerate(lines, 1):
        halves = line.split("\t")
        if len(halves) != 2:
            raise UserError(
                f"line {number}: {len(halves) - 1} tabs; a pair is its source, one tab and its "
                "target."
            )
        pairs.append(Pair(*halves))
    packed, counts = task.chunk_packer(vocabs)(pairs, chosen_tag(tag, task.tags), False)
    rows = task.rows(packed.arrays, counts, vocabs, pieces=packed.pieces)
    return rows, [pair.target for pair in pairs]
