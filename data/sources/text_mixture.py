"""Mixes the text of several sources at rates that the settings choose."""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any

from pydantic import Field

from configs.errors import UserError, listed
from configs.spec import Positive, spec
from data.mixture import MixtureOrder
from data.sources import mixing
from data.sources.pairs import Pairs
from data.sources.text import SPLITS, Source


@spec
class TextMixture(Source):
    """Reads the text of several sources as one; the parts of a batch come at rates that the
    settings choose.

    Each part is packed into rows of its own, and rates and sizes are of rows.
    """

    parts: Annotated[tuple[Source, ...], Field(min_length=1)]
    """Sources to mix; in a gin file each has a scope, as in (@web/JsonlText(), @books/TextFiles()).
    """
    rates: tuple[Positive, ...] | None = None
    """One number per part, with any sum. None: by size."""
    temperature: Positive = 1.0
    """By size, a rate is proportional to size ** (1 / temperature): 1 draws from each part in
    proportion to its size, and a large number from all parts alike."""

    def __post_init__(self) -> None:
        problems = list(self._problems())
        if problems:
            raise UserError(listed("TextMixture", problems))

    def splits(self) -> tuple[str, ...]:
        return tuple(s for s in SPLITS if any(s in part.splits() for part in self.parts))

    def lines(self, split: str) -> Iterator[str]:
        for part in self.parts_of(split).values():
            yield from part.lines(split)

    def fingerprint(self) -> dict[str, Any] | None:
        fingerprints = {str(i): part.fingerprint() for i, part in enumerate(self.parts, 1)}
        return fingerprints if None not in fingerprints.values() else None

    @property
    def has_newlines(self) -> bool:
        return any(part.has_newlines for part in self.parts)

    def parts_of(self, split: str) -> dict[str, Source]:
        """Names the parts that have a split, by name or kind; kinds that are alike are numbered."""
        named = zip(self._names(), self.parts, strict=True)
        return {name: part for name, part in named if split in part.splits()}

    def mix(self, rows: Sequence[int]) -> MixtureOrder:
        return mixing.order_of(rows, self.rates, self.temperature)

    def _names(self) -> list[str]:
        kinds = [type(part).__name__ for part in self.parts]
        return mixing.part_names([part.part_name for part in self.parts], kinds)

    def _problems(self) -> Iterator[str]:
        for part in self.parts:
            if isinstance(part, Pairs):
                yield (
                    f"TextMixture.parts: @{type(part).__name__}() yields pairs.  @Mixture() mixes "
                    "those, for @Translation()."
                )
            if isinstance(part, TextMixture):
                yield "TextMixture.parts: a part is a mixture itself.  Name its parts here instead."
        yield from mixing.name_problems("TextMixture", "train", self._names())
        training = [part for part in self.parts if "train" in part.splits()]
        yield from mixing.rate_problems("TextMixture", self.rates, self.temperature, len(training))
