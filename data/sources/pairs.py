"""Defines sources of pairs: each yields the sentences of a split beside their translations."""

import re
from collections.abc import Iterator, Sequence
from typing import Annotated, NamedTuple

from pydantic import Field

from configs.errors import UserError, did_you_mean
from configs.spec import abstract_spec
from data.mixture import MixtureOrder
from data.sources.text import Source

LANGUAGE = "{language}"  # what a mixture of languages puts a language for
_NAME = rf"^([A-Za-z0-9_-]|{re.escape(LANGUAGE)})+$"
_BREAKS = re.compile(r"[\t\n\r]")


class Pair(NamedTuple):
    """Holds a sentence and its translation, each without tabs and line breaks."""

    source: str
    target: str


def tag_word(tag: str) -> str:
    """Returns a tag as source lines have it: one sub-word of the source vocab.

    >>> tag_word("2de")
    '<2de>'
    """
    return f"<{tag}>"


def tagged(line: str, tag: str | None) -> str:
    """Writes a tag in front of a source line: what a model of many languages reads.

    >>> tagged("Good morning.", "2de")
    '<2de> Good morning.'
    >>> tagged("Good morning.", None)
    'Good morning.'
    """
    return line if tag is None else f"{tag_word(tag)} {line}"


def chosen_tag(tag: str | None, tags: tuple[str, ...]) -> str | None:
    """Returns the tag to write in front of source lines, one of those that a task knows.

    None stands for the only tag, or for none if the task has none.
    """
    if tag is None and len(tags) <= 1:
        return tags[0] if tags else None
    if tag in tags:
        return tag
    problem = "no tag was given" if tag is None else f"tag {tag!r}: no part of the task has it"
    if not tags:
        raise UserError(f"{problem}.  The task has no tags: unset it.")
    raise UserError(f"{problem}.{did_you_mean(tag or '', tags)}  Legal: {', '.join(tags)}.")


@abstract_spec
class Pairs(Source):
    """Reads the pairs of a translation; a task file names one of its kinds."""

    tag: Annotated[str, Field(pattern=_NAME)] | None = None
    """Written as <tag> in front of each source line, for a model that serves many languages."""
    name: Annotated[str, Field(pattern=_NAME)] | None = None
    """Name in results. None: its tag or its kind."""

    def read(self, split: str, errors: str = "strict") -> Iterator[Pair]:
        """Yields the pairs of a split as they stand in its files, always in the same order.

        errors is what bytes.decode makes of bytes that are not UTF-8.
        """
        raise NotImplementedError

    def untagged(self, split: str, errors: str = "strict") -> Iterator[Pair]:
        """Yields the pairs of a split without their tag; tabs and line breaks become spaces."""
        for source, target in self.read(split, errors):
            yield Pair(_BREAKS.sub(" ", source), _BREAKS.sub(" ", target))

    def pairs(self, split: str, errors: str = "strict") -> Iterator[Pair]:
        """Yields the pairs of a split as the model reads them: each source line with its tag."""
        for part in self.parts_of(split).values():
            for source, target in part.untagged(split, errors):
                yield Pair(tagged(source, part.tag), target)

    def lines(self, split: str, errors: str = "strict") -> Iterator[str]:
        """Yields each pair as one line, its halves with a tab between."""
        for part in self.parts_of(split).values():
            yield from map("\t".join, part.untagged(split, errors))

    def parts_of(self, split: str) -> dict[str, "Pairs"]:
        """Names the sources that this one mixes in a split; just itself if it is not a mixture."""
        return {self.name or self.tag or type(self).__name__: self}

    @property
    def tags(self) -> tuple[str, ...]:
        """Names the tags that source lines may have."""
        return () if self.tag is None else (self.tag,)

    def mix(self, rows: Sequence[int]) -> MixtureOrder | None:
        """Returns the rates of the parts in training, given the number of rows of each."""
        return None
