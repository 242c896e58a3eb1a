"""A task: which text, which vocab, and how its examples lie in rows."""

import re
from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from configs.errors import UserError
from configs.spec import spec
from data.sources import pair_kinds as pair_kinds  # task files name what it defines
from data.sources.clean import Clean
from data.sources.pairs import Pairs
from data.sources.text import Source
from data.vocab import SentencePiece

Length = Annotated[int, Field(ge=2, le=65_536)]


@spec
class Task:
    """What `prepare` makes rows from: here of text, for a language model."""

    name: str
    """Names the cache: a folder of data_dir."""
    source: Source
    vocab: SentencePiece
    length: Length
    """Tokens a row."""
    packs: bool = True
    """Several examples share a row; otherwise each has its own."""
    word_list: str | None = None
    """A file of words, one a line; other words are read as <UNK>, which is LM1B's rule."""

    def __post_init__(self) -> None:
        kind = type(self).__name__
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", self.name):
            raise UserError(
                f"{kind}.name = {self.name!r}: it names a folder of data_dir.  "
                "Legal: letters, digits, '_', '-' and '.', with no '.' or '-' in front."
            )
        if isinstance(self.source, Pairs) and not isinstance(self, Translation):
            raise UserError(
                f"{kind}.source = @{type(self.source).__name__}(): these are pairs.  "
                "Take @Translation() instead of @Task()."
            )
        if "train" not in self.source.splits():
            raise UserError(
                f"{kind}.source = @{type(self.source).__name__}(): it has no text to train on.  "
                f"Found: {', '.join(self.source.splits())}."
            )

    @property
    def array_lengths(self) -> dict[str, int]:
        """Names the arrays of a batch, each with its length in a row."""
        names = ("inputs_BL", "targets_BL", "segments_BL", "positions_BL")
        return dict.fromkeys(names, self.length)

    @property
    def tags(self) -> tuple[str, ...]:
        """Names the tags that a source line may have."""
        return ()

    def lines(self, split: str) -> Iterator[str]:
        """Yields the raw text of a split."""
        return self.source.lines(split)


@spec
class Translation(Task):
    """A task of pairs, for a model that translates the source into the target."""

    source: Pairs
    vocab: SentencePiece
    """Of the target; of both sides, and trained on both, where source_vocab is None."""
    source_vocab: SentencePiece | None = None
    length: Length
    """Target tokens a row."""
    source_length: Length
    """Source tokens a row.  A pair that is longer than a row on either side is left out."""
    clean: Clean = Clean()
    word_list: None = None
    """A translation reads every word."""

    @property
    def array_lengths(self) -> dict[str, int]:
        """Names the arrays of a batch, each with its length in a row."""
        names = ("inputs_BM", "segments_BM", "positions_BM")
        return {**dict.fromkeys(names, self.source_length), **super().array_lengths}

    @property
    def tags(self) -> tuple[str, ...]:
        """Names the tags that a source line may have."""
        return self.source.tags

    def lines(self, split: str) -> Iterator[str]:
        """Yields the raw text of a split, a pair a line."""
        return self.source.lines(split, self.clean.errors)
