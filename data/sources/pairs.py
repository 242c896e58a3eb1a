"""Defines sources of pairs, which yield the sentences of a split with their translations."""

import re
from collections.abc import Iterator
from typing import Annotated, ClassVar, NamedTuple

from pydantic import Field

from configs.errors import UserError, did_you_mean
from configs.spec import Described, abstract_spec
from data.sources.text import Source

LANGUAGE = "{language}"  # what a mixture of languages replaces with a language
Name = Annotated[
    str,
    Field(pattern=rf"^([A-Za-z0-9_-]|{re.escape(LANGUAGE)})+$"),
    Described(f"of letters from A to Z or a to z, digits, '_' and '-', and {LANGUAGE}"),
]
Tag = Annotated[
    str,
    Field(pattern=r"^[^\s▁]*\w[^\s▁]*$"),
    Described("of one word (no space, no '▁') with a letter or digit"),  # ▁: SentencePiece's space
]
_BARE_TAG = re.compile(r"[\w-]+")
_BREAKS = re.compile(r"[\t\n\r]")


class Pair(NamedTuple):
    """Holds a sentence and its translation, or a prompt and its answer."""

    source: str
    target: str


class Preference(NamedTuple):
    """Holds a prompt, the preferred answer and the rejected one, in place of a Pair."""

    source: str
    target: str
    rejected: str


def tag_word(tag: str) -> str:
    """Returns a tag as it is in source lines: one sub-word of the source vocab.

    A tag with characters other than letters, digits, _ and - stays as it is.
    """
    return f"<{tag}>" if _BARE_TAG.fullmatch(tag) else tag


def tagged(line: str, tag: str | None) -> str:
    """Writes a tag in front of a source line, for a model of many languages."""
    return line if tag is None else f"{tag_word(tag)} {line}"


def chosen_tag(tag: str | None, tags: tuple[str, ...]) -> str | None:
    """Returns the tag to write in front of source lines, which must be one of the task's tags.

    None selects the only tag, or no tag if the task has none.
    """
    if tag is None and len(tags) <= 1:
        return tags[0] if tags else None
    for known in tags:
        if tag is not None and tag_word(tag) == tag_word(known):
            return known
    problem = "no tag was given" if tag is None else f"tag {tag!r}: no part of the task has it"
    if not tags:
        raise UserError(f"{problem}.  The task has no tags: unset it.")
    raise UserError(f"{problem}.{did_you_mean(tag or '', tags)}  Legal: {', '.join(tags)}.")


@abstract_spec
class Pairs(Source):
    """Reads the pairs of a translation; a task file names one of its kinds."""

    has_rejected: ClassVar[bool] = False
    """Whether each has another answer, which is rejected."""
    has_chats: ClassVar[bool] = False
    """Whether each source is a chat as JSON, and its target all answers."""

    tag: Tag | None = None
    """Put before each source line, for multilingual models. A plain tag such as "2de" becomes
    <2de>; a tag with other characters, such as "<2de>", "[de]" or ">>deu<<", is used as it is."""
    name: Name | None = None
    """Name in results. None: its tag or the kind of source."""

    def read(self, split: str, errors: str = "strict") -> Iterator[Pair]:
        """Yields the raw pairs of a split, always in the same order.

        errors is how `bytes.decode` handles bytes that are not UTF-8.
        """
        raise NotImplementedError(f"{type(self).__name__} has no read")

    def read_prompts(self, split: str, errors: str = "strict") -> Iterator[Pair]:
        """Yields the pairs of a split like `read`, but holds pairs out by their sources.

        There may be few answers, such as yes and no, and each split needs all of them.
        """
        return self.read(split, errors)

    def untagged(self, split: str, errors: str = "strict") -> Iterator[Pair]:
        """Yields the pairs of a split without their tag; tabs and line breaks become spaces."""
        for source, target in self.read(split, errors):
            yield Pair(_BREAKS.sub(" ", source), _BREAKS.sub(" ", target))

    @property
    def name_and_label(self) -> tuple[str | None, str]:
        """Returns the name in the settings, and a label: the tag, or else the kind."""
        return self.name, "_".join(_BARE_TAG.findall(self.tag or "")) or type(self).__name__

    @property
    def tags(self) -> tuple[str, ...]:
        """Returns the tags that source lines may have."""
        return () if self.tag is None else (self.tag,)
