"""Makes a parallel corpus without limit: things drawn by a seed and said in two languages.

Names, dates, times, numbers, lists of them, and sentences made of these, in the words of CLDR's
locale data.
"""

import functools
import hashlib
import importlib.metadata
import random
import re
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import TypeVar

from babel.core import get_global

from configs.errors import UserError, did_you_mean
from data.corpora import phrase_words as say
from data.corpora.phrase_words import Meaning

_T = TypeVar("_T")
Kind = Callable[["Draw"], Meaning]
LANGUAGES = tuple(re.findall(r"\w+", "cs da de el es fi fr hu id it nb nl pl pt ro ru sv tr uk"))
"""Each may be source or target; so may "en"."""


@functools.lru_cache(maxsize=32)  # it is read for each vocab and split, and takes 4 s to make
def corpus(
    language: str, target: str, seed: int, train: int, held_out: int
) -> dict[str, list[tuple[str, str]]]:
    """Returns pairs (source, target) for each split; no source occurs twice, in one or in two.

    A larger `train` only adds pairs, all to train.
    """
    _check(language, target)
    sizes = {"train": train, "validation": held_out, "test": held_out}
    splits: dict[str, list[tuple[str, str]]] = {split: [] for split in sizes}
    draw = Draw(language, target, seed)
    sources: set[str] = set()
    while any(len(splits[split]) < count for split, count in sizes.items()):
        meaning = sentence(draw)
        source = meaning(language)
        split = split_of(source)
        if source not in sources and len(splits[split]) < sizes[split]:
            sources.add(source)
            splits[split].append((source, meaning(target)))
    return splits


def split_of(source: str) -> str:
    """Assigns a source sentence to a split: 4 of 100 to validation, 4 to test."""
    place = int.from_bytes(hashlib.sha256(source.encode()).digest()[:8], "big") % 100
    return "validation" if place < 4 else "test" if place < 8 else "train"


def versions() -> dict[str, str]:
    """Names what the text depends on: the libraries, their data and the rules that draw from it."""
    files = ("phrases.py", "phrase_words.py")
    rules = b"".join(Path(__file__).with_name(name).read_bytes() for name in files)
    return {
        "babel": importlib.metadata.version("babel"),
        "cldr": str(get_global("cldr")["version"]),
        "rules": hashlib.sha256(rules).hexdigest()[:16],
    }


def _check(language: str, target: str) -> None:
    legal = sorted((*LANGUAGES, "en"))
    for name in (language, target):
        if name not in legal:
            raise UserError(
                f"language {name!r}: has no phrases.  Legal: {', '.join(legal)}."
                + did_you_mean(name, legal)
            )
    if language == target:
        raise UserError(f"phrases from {language!r} to {target!r}: name two different languages.")


class Draw:
    """Draws what to say.  Equal seeds draw equally, in every process and version of Python."""

    def __init__(self, language: str, target: str, seed: int):
        # Of all that `random` offers, Python promises the same numbers for this method alone.
        self._fraction = random.Random(f"{language} {target} {seed}").random
        self._codes = shared_names(language, target)

    def between(self, low: int, high: int) -> int:
        return low + int(self._fraction() * (high - low + 1))

    def chance(self, percent: int) -> bool:
        return self._fraction() * 100 < percent

    def one(self, of: Sequence[_T]) -> _T:
        return of[int(self._fraction() * len(of))]

    def code(self, kind: str) -> str:
        """Draws a name's code: the first ones often, the last two thirds as often as the mean."""
        codes = self._codes[kind]
        return codes[int(self._fraction() ** 1.5 * len(codes))]

    def codes(self, kind: str, count: int) -> list[str]:
        """Draws different codes of a kind."""
        codes: dict[str, None] = {}
        while len(codes) < count:
            codes[self.code(kind)] = None
        return list(codes)

    def day(self) -> datetime:
        return datetime(1980, 1, 1) + timedelta(days=self.between(0, 50 * 365))

    def moment(self) -> datetime:
        return self.day() + timedelta(minutes=5 * self.between(0, 24 * 12 - 1))


def shared_names(language: str, target: str) -> dict[str, list[str]]:
    """Returns the codes of each kind that both languages name.

    Where a name of the source has two translations, only the first one's code stays.
    """
    meanings: dict[str, str] = {}
    codes: dict[str, list[str]] = {kind: [] for kind in say.KINDS}
    for kind in say.KINDS:
        translations = say.names(kind, target)
        for code, name in say.names(kind, language).items():
            translation = translations.get(code)
            if translation and meanings.setdefault(name, translation) == translation:
                codes[kind].append(code)
    return codes


def _listed(parts: Sequence[Meaning], style: str) -> Meaning:
    return lambda language: say.listed(tuple(part(language) for part in parts), style, language)


def _joined(pattern: str, *parts: Meaning) -> Meaning:
    """Puts meanings into a pattern of marks that both languages share."""
    return lambda language: pattern.format(*(part(language) for part in parts))


def _style(draw: Draw) -> str:
    return "or" if draw.chance(30) else "and"


_NAMED = ("territory",) * 6 + ("language",) * 4 + ("currency",) * 2
_LISTED = (*_NAMED, *_NAMED, "weekday", "month")


def _name(draw: Draw) -> Meaning:
    kind = draw.one(_NAMED)
    return partial(say.name, kind, draw.code(kind))


def _names(draw: Draw) -> Meaning:
    """Draws a list of names of one kind."""
    kind = draw.one(_LISTED)
    codes = draw.codes(kind, draw.between(3, 5))
    return _listed([partial(say.name, kind, code) for code in codes], _style(draw))


_DATES = ("full", "full", "long", "medium", "yMMMM", "MMMMd", "yMMMEd", "yQQQQ", "yw", "MMMMW")


def _date(draw: Draw) -> Meaning:
    return partial(say.date, draw.day(), draw.one(_DATES))


def _time(draw: Draw) -> Meaning:
    if draw.chance(50):
        return partial(say.time, draw.moment())
    return partial(say.date, draw.moment(), draw.one(("Bh", "Bhm", "EBhm")))


def _date_and_time(draw: Draw) -> Meaning:
    return partial(say.date_and_time, draw.moment(), draw.one(("full", "long")))


_LARGEST: tuple[tuple[say.Unit, int], ...] = (
    ("year", 30), ("month", 11), ("week", 3), ("day", 6), ("hour", 23), ("minute", 59),
    ("second", 59),
)  # fmt: skip


def _span(draw: Draw) -> Meaning:
    unit, largest = draw.one(_LARGEST)
    return partial(say.span, draw.between(1, largest), unit)


_PAID = ("EUR", "EUR", "USD", "GBP", "CHF", "JPY", "SEK", "INR", "BRL")


def _round(draw: Draw, scales: Sequence[float] = (1, 1, 10, 10, 100, 0.1, 0.1)) -> float:
    """Draws a number with one or two digits that are not zero: 7, 40, 250, 1.5."""
    digits = draw.between(1, 9) if draw.chance(40) else draw.between(10, 99)
    return round(digits * draw.one(scales), 1)


def _money(draw: Draw) -> Meaning:
    if draw.chance(40):
        return partial(say.money, _round(draw), draw.one(_PAID), "sign")
    return partial(say.money, _round(draw, (1, 10, 100)), draw.code("currency"), "name")


def _number(draw: Draw) -> Meaning:
    if draw.chance(50):
        return partial(say.percent, draw.between(1, 199) / draw.one((1, 2)))
    return partial(say.number, _round(draw, (1, 10, 100, 1000)))


_MEASURES = (_money, _number, _span)
_VALUES = (*_MEASURES, *_MEASURES, *(_date,) * 3, _time)


def _value(draw: Draw) -> Meaning:
    return draw.one(_VALUES)(draw)


def _values(draw: Draw) -> Meaning:
    """Draws values of one kind."""
    kind = draw.one(_VALUES)
    return _listed([kind(draw) for _ in range(draw.between(2, 3))], _style(draw))


def _mixed(draw: Draw) -> Meaning:
    kinds = (_name, _name, _value)
    return _listed([draw.one(kinds)(draw) for _ in range(draw.between(2, 4))], _style(draw))


def _route(draw: Draw) -> Meaning:
    """Draws from where to where, and when, how long or for how much."""
    ends = (partial(say.name, "territory", code) for code in draw.codes("territory", 2))
    return _joined("{} \u2013 {}: {}", *ends, draw.one((_date_and_time, _span, _money))(draw))


def _filled(pattern: str, *places: Sequence[Kind]) -> Kind:
    """Returns what draws a sentence: a pattern, and the kinds for each of its places."""
    return lambda draw: _joined(pattern, *[draw.one(kinds)(draw) for kinds in places])


_labelled = _filled("{}: {}", (_name, _names), (_value, _value, _values, _names))
"""Who, and what is said of it: "Germany: 12 hours", "Germany: Sorbian and Frisian"."""
_report = _filled("{}, {}: {}", (_name,), (_date, _date_and_time), _MEASURES)
"""Where and when, and what was measured."""
_agenda = _filled("{}: {}", (_date, _date_and_time), (_names, _mixed, _values))
"""A time, and who or what is due."""
_CLAUSES = (_labelled, _mixed, _values, _names)

_SENTENCES = (
    *(_labelled,) * 5,
    *(_names, _report, _mixed) * 3,
    *(_route, _agenda, _values, _filled("{}; {}", _CLAUSES, _CLAUSES)) * 2,
)


def sentence(draw: Draw) -> Meaning:
    """Draws a sentence of any kind."""
    return draw.one(_SENTENCES)(draw)
