"""Mixes sources at rates that the settings choose."""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any

from pydantic import Field

from configs.errors import UserError, listed
from configs.spec import Count, NotNegative, Positive, abstract_spec, spec
from data.mixture import MixtureOrder
from data.sources.pairs import Pairs
from data.sources.text import SPLITS, Source

Stage = tuple[Count, tuple[NotNegative, ...]]


@abstract_spec
class MixedSource(Source):
    """Reads several sources as one; a task file names a kind of them."""

    rates: tuple[NotNegative, ...] | None = None
    """One number per part, with any sum; parts without a number get 0. Use 0 for a part that only a
    later stage reads. None: by size."""
    temperature: Positive = 1.0
    """Rates by size are proportional to size ** (1 / temperature): 1 samples parts in proportion to
    their sizes, a large number samples all parts equally."""
    stages: tuple[Stage, ...] = ()
    """Changes the rates during the run: pairs (steps, rates), in order; after that many steps,
    batches use these rates. A part with rate 0 is not read. --override adds stages to a run that
    has not reached them, and with them parts at the end of a mixture that has rates."""

    def __post_init__(self) -> None:
        problems = [*self.problems(), *self._rate_problems()]
        if problems:
            raise UserError(listed(type(self).__name__, problems))

    @property
    def all_parts(self) -> Sequence[Source]:
        """Returns the sources that are mixed."""
        raise NotImplementedError(f"{type(self).__name__} has no all_parts")

    def named_parts(self) -> list[tuple[str, Any]]:
        """Returns the parts with their names; equal default names are numbered."""
        parts = self.all_parts
        names, labels = zip(*(part.name_and_label for part in parts), strict=True)
        numbered = [
            f"{label}_{labels[:i].count(label) + 1}" if labels.count(label) > 1 else label
            for i, label in enumerate(labels)
        ]
        return [(n or label, part) for n, label, part in zip(names, numbered, parts, strict=True)]

    def parts_of(self, split: str) -> dict[str, Any]:
        """Returns the parts that have a split, by name, or else by tag or kind."""
        return {name: part for name, part in self.named_parts() if split in part.splits()}

    def problems(self) -> Iterator[str]:
        """Describes what is wrong with the parts and their names."""
        raise NotImplementedError(f"{type(self).__name__} has no problems")

    def splits(self) -> tuple[str, ...]:
        return tuple(s for s in SPLITS if any(s in part.splits() for part in self.all_parts))

    def bytes_to_read(self, split: str) -> int | None:
        sizes = [part.bytes_to_read(split) for part in self.parts_of(split).values()]
        known = [size for size in sizes if size is not None]
        return sum(known) if len(known) == len(sizes) else None

    def remedies(self, split: str) -> Sequence[str]:
        parts = [part for part in self.all_parts if split in part.splits()]
        return tuple(dict.fromkeys(text for part in parts for text in part.remedies(split)))

    def fingerprint(self) -> dict[str, Any] | None:
        fingerprints = {str(i): part.fingerprint() for i, part in enumerate(self.all_parts, 1)}
        return fingerprints if None not in fingerprints.values() else None

    def mix(self, rows: Sequence[int]) -> MixtureOrder:
        rates = self.rates or [n ** (1 / self.temperature) for n in rows]
        return MixtureOrder.of(rows, rates, self.stages)

    def name_problems(self, *splits: str) -> Iterator[str]:
        """Describes the names that several parts of a split share, given or not."""
        for split in splits:
            names = [name for name, part in self.named_parts() if split in part.splits()]
            if twice := sorted({name for name in names if names.count(name) > 1}):
                yield (
                    f"{type(self).__name__}.parts: several of {split!r} have the name "
                    f"{', '.join(twice)}.  Give each its own name."
                )

    def _rate_problems(self) -> Iterator[str]:
        kind = type(self).__name__
        parts = sum("train" in part.splits() for part in self.all_parts)
        settings = {} if self.rates is None else {f"{kind}.rates": self.rates}
        settings |= {f"{kind}.stages[{i}]": rates for i, (_, rates) in enumerate(self.stages)}
        fewest = 0 if self.rates else parts  # later rates may cover more parts, never fewer
        for name, rates in settings.items():
            if not fewest <= len(rates) <= parts:
                yield (
                    f"{name}: {len(rates)} rates for {parts} parts.  "
                    "Give one number for each part, in their order."
                )
            elif not any(rates):
                yield f"{name}: all rates are 0.  Give at least one part a rate above 0."
            fewest = len(rates)
        if self.rates is not None:
            for number in range(parts):
                if not any(any(rates[number : number + 1]) for rates in settings.values()):
                    yield (
                        f"{kind}.rates[{number}]: is 0 or missing, and no stage reads this part.  "
                        f"Give it a rate above 0, here or in {kind}.stages, or remove the part."
                    )
        steps = [step for step, _ in self.stages]
        if steps != sorted(set(steps)):
            yield (f"{kind}.stages: begin after steps {steps}.  The steps must increase.")
        if self.rates is not None and self.temperature != 1:
            yield (
                f"{kind}.temperature = {self.temperature}: it applies only to rates by size, but "
                f"{kind}.rates is set.  Unset one of them."
            )


@spec
class TextMixture(MixedSource):
    """Mixes the text of several sources; the settings choose the rate of each part in a batch.

    Each part is packed into its own rows; rates and sizes count rows.
    """

    parts: Annotated[tuple[Source, ...], Field(min_length=1)]
    """Sources to mix. In a gin file, each has its own scope, as in (@web/JsonlText(),
    @books/TextFiles()).
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
                yield "TextMixture.parts: a part is itself a mixture.  List its parts here instead."
        yield from self.name_problems("train")
