"""Says names, dates and amounts in the words of a language: CLDR's, through Babel.

Every function takes the code of the language last, so that `partial` makes a meaning of it.
"""

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime, timedelta
from typing import Any, Literal

from babel import Locale, dates, lists, numbers
from babel.core import get_global

Meaning = Callable[[str], str]
"""Something to say: given the code of a language, its words."""

Width = Literal["full", "long", "medium"]
Unit = Literal["second", "minute", "hour", "day", "week", "month", "year"]

_SECONDS = dict(dates.TIMEDELTA_UNITS)
# Spaces of typography become plain ones; a soft hyphen is none.
_PLAIN = str.maketrans({"\u00a0": " ", "\u202f": " ", "\u2009": " ", "\u00ad": None})
_cached = functools.lru_cache(maxsize=1 << 16)


def _plain(text: str) -> str:
    return text.translate(_PLAIN)


@functools.cache
def names(kind: str, language: str) -> dict[str, str]:
    """Returns the names of a kind by code, the most used first."""
    return {code: _plain(name) for code, name in _NAMES[kind](Locale.parse(language)).items()}


KINDS = ("territory", "language", "currency", "weekday", "month")


def name(kind: str, code: str, language: str) -> str:
    return names(kind, language)[code]


def _known(codes: Iterable[str], table: Mapping[str, Any]) -> dict[str, str]:
    return {code: table[code] for code in codes if table.get(code)}


@functools.cache
def _territory_codes() -> list[str]:
    """Orders the territories by the number of languages spoken there, a measure of their size."""
    spoken = get_global("territory_languages")
    known = [code for code in spoken if code.isalpha() and code != "ZZ"]
    return sorted(known, key=lambda code: (-len(spoken[code]), code))


def _languages(locale: Locale) -> dict[str, str]:
    """Names the languages that are official somewhere."""
    spoken = get_global("territory_languages")
    official = Counter(
        code for table in spoken.values() for code, how in table.items() if how["official_status"]
    )
    return _known((code for code, _ in official.most_common()), locale.languages)


def _currencies(locale: Locale) -> dict[str, str]:
    """Names the currencies in use today."""
    paid = get_global("territory_currencies")
    today = Counter(
        code for table in paid.values() for code, _, end, tender in table if tender and end is None
    )
    return _known((code for code, _ in today.most_common()), locale.currencies)


_NAMES: dict[str, Callable[[Locale], dict[str, str]]] = {
    "territory": lambda locale: _known(_territory_codes(), locale.territories),
    "language": _languages,
    "currency": _currencies,
    "weekday": lambda locale: {str(i): locale.days["stand-alone"]["wide"][i] for i in range(7)},
    "month": lambda locale: {str(i): locale.months["stand-alone"]["wide"][i] for i in range(1, 13)},
}


def listed(parts: tuple[str, ...], style: str, language: str) -> str:
    """Joins parts by the language's comma and its word for "and" (standard) or "or"."""
    return _plain(lists.format_list(parts, "or" if style == "or" else "standard", language))


@_cached
def date(day: datetime, width: str, language: str) -> str:
    """Says a date, by a width (full, long, medium) or by a skeleton of CLDR's (yMMMM)."""
    if width in Locale.parse(language).date_formats:
        return _plain(dates.format_date(day, width, language))
    return _plain(dates.format_skeleton(width, day, fuzzy=False, locale=language))


@_cached
def time(moment: datetime, language: str) -> str:
    return _plain(dates.format_time(moment, "short", locale=language))


@_cached
def date_and_time(moment: datetime, width: Width, language: str) -> str:
    pattern = dates.get_datetime_format(width, language)
    words = str(pattern).replace("{0}", time(moment, language))
    return _plain(words.replace("{1}", date(moment, width, language)))


@_cached
def span(count: int, unit: Unit, language: str) -> str:
    """Says how long, such as "3 days"."""
    # Babel's own names of days and hours lack plurals in some languages; these do not.
    delta = timedelta(seconds=count * _SECONDS[unit])
    # The threshold keeps it from the next larger unit.
    return _plain(dates.format_timedelta(delta, unit, 1_000_000, locale=language))


@_cached
def number(value: float, language: str) -> str:
    return _plain(numbers.format_decimal(value, locale=language))


@_cached
def percent(value: float, language: str) -> str:
    """Says a percentage; the value is of 100."""
    return _plain(numbers.format_percent(value / 100, None, language, decimal_quantization=False))


@_cached
def money(value: float, currency: str, style: str, language: str) -> str:
    """Says an amount with the currency's sign and cents, or with its name."""
    text = numbers.format_currency(
        value,
        currency,
        locale=language,
        format_type="name" if style == "name" else "standard",
        currency_digits=style != "name",
    )
    return _plain(text)
