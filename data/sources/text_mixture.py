"""Mixes the text of several sources at rates that the settings choose."""

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from configs.spec import spec
from data.sources import mixing
from data.sources.pairs import Pairs
from data.sources.text import Source


@spec
class TextMixture(mixing.MixedSource):
    """Reads the text of several sources as one; the parts of a batch come at rates that the
    settings choose.

    Each part is packed into rows of its own, and rates and sizes are of rows.
    """

    parts: Annotated[tuple[Source, ...], Field(min_length=1)]
    """Sources to mix; in a gin file each has a scope, as in (@web/JsonlText(), @books/TextFiles()).
    """

    @property
    def all_parts(self) -> tuple[Source, ...]:
        return self.parts

    def lines(self, split: str) -> Iterator[str]:
        for part in self.parts_of(split).values():
            yield from part.lines(split)

    @property
    def has_newlines(self) -> bool:
        return any(part.has_newlines for part in self.parts)

    def problems(self) -> Iterator[str]:
        for part in self.parts:
            if isinstance(part, Pairs):
                yield (
                    f"TextMixture.parts: @{type(part).__name__}() yields pairs.  @Mixture() mixes "
                    "those, for @Translation()."
                )
            if isinstance(part, TextMixture):
                yield "TextMixture.parts: a part is a mixture itself.  Name its parts here instead."
        yield from self.name_problems("train")
