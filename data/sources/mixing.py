"""Names the parts of a mixture and sets their rates, of text and of pairs."""

from collections.abc import Iterator, Sequence

from data.mixture import MixtureOrder

Rates = tuple[float, ...] | None


def part_names(names: Sequence[str | None], labels: Sequence[str]) -> list[str]:
    """Returns the name of each part, or its label; labels that are alike are numbered.

    >>> part_names([None, "web", None], ["Tsv", "Tsv", "Tsv"])
    ['Tsv_1', 'web', 'Tsv_3']
    """
    return [
        name or (f"{label}_{labels[:i].count(label) + 1}" if labels.count(label) > 1 else label)
        for i, (name, label) in enumerate(zip(names, labels, strict=True))
    ]


def order_of(rows: Sequence[int], rates: Rates, temperature: float) -> MixtureOrder:
    """Returns the order of the rows of some parts, given how many each has."""
    return MixtureOrder.of(rows, rates or [size ** (1 / temperature) for size in rows])


def name_problems(kind: str, split: str, names: Sequence[str]) -> Iterator[str]:
    """Describes the names that several parts of a split have, given or not."""
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        yield f"{kind}.parts: several of {split!r} have the name {', '.join(twice)}."


def rate_problems(kind: str, rates: Rates, temperature: float, parts: int) -> Iterator[str]:
    """Describes what is wrong with the rates of so many parts."""
    if rates is not None and len(rates) != parts:
        yield (
            f"{kind}.rates: {len(rates)} rates for {parts} parts.  "
            "Give one number for each part, in their order."
        )
    if rates is not None and temperature != 1:
        yield (
            f"{kind}.temperature = {temperature}: it counts only by size, and {kind}.rates is "
            "set.  Unset one of them."
        )
