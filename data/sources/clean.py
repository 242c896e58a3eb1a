"""Drops training pairs, and counts them by reason."""

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Annotated

from pydantic import Field

from configs.errors import UserError
from configs.spec import Count, spec
from data.sources.pairs import Pair
from data.sources.text_files import LONE_SURROGATE

_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")  # not \t, \n and \r, of prompts
# Reasons, as tables and manifests have them.
_NOT_UTF8 = "not UTF-8"
_EMPTY = "an empty side"
_CONTROL_CHARACTERS = "control characters"
_SHORT = "below min_characters"
_LONG = "above max_characters"
_UNEQUAL = "above max_ratio"
_REPEAT = "a repeat"


@spec
class Clean:
    """Chooses which training pairs are dropped; other splits stay complete, and so comparable.

    Lengths are in characters, because not every language puts spaces between words, and before the
    vocab is trained there are no tokens.
    """

    drops_empty: bool = True
    """Drops a pair of which one side has only white space."""
    drops_invalid_utf8: bool = False
    """Drops a pair with bytes that are not UTF-8, from every split; otherwise it is an error."""
    drops_control_characters: bool = False
    """Drops a pair with a control character on either side, other than tabs and line breaks."""
    drops_duplicates: bool = False
    """Drops a pair that occurred before in the same part of a mixture. This takes about 100 bytes
    of memory per pair."""
    min_characters: Count | None = None
    """Minimum number of characters on either side."""
    max_characters: Count | None = None
    """Maximum number of characters on either side."""
    max_ratio: Annotated[float, Field(ge=1)] | None = None
    """Maximum ratio of the characters of the longer side to those of the shorter one. Moses's
    clean-corpus-n.perl counts words instead."""

    def __post_init__(self) -> None:
        if (self.min_characters or 0) > (self.max_characters or float("inf")):
            raise UserError(
                f"Clean.min_characters = {self.min_characters} is more than Clean.max_characters "
                f"= {self.max_characters}: no pair would be left."
            )

    @property
    def errors(self) -> str:
        """Returns the error handler of bytes.decode for bytes that are not UTF-8."""
        return "surrogateescape" if self.drops_invalid_utf8 else "strict"

    def reasons(self, split: str) -> list[str]:
        """Names the reasons for which pairs of a split may be dropped, as they are tested."""
        if split != "train":
            return [_NOT_UTF8] if self.drops_invalid_utf8 else []
        reasons = {
            _NOT_UTF8: self.drops_invalid_utf8,
            _EMPTY: self.drops_empty,
            _CONTROL_CHARACTERS: self.drops_control_characters,
            _SHORT: self.min_characters is not None,
            _LONG: self.max_characters is not None,
            _UNEQUAL: self.max_ratio is not None,
            _REPEAT: self.drops_duplicates,
        }
        return [reason for reason, is_chosen in reasons.items() if is_chosen]

    def kept(self, pairs: Iterable[Pair], split: str, dropped: Counter[str]) -> Iterator[Pair]:
        """Yields the pairs of a split that are not dropped, and counts the others by reason.

        A reason that drops no pair counts 0.
        """
        dropped.update(dict.fromkeys(self.reasons(split), 0))
        reason_of = _first_reason(self) if split == "train" else _unreadable
        for pair in pairs:
            reason = reason_of(pair)
            if reason is None:
                yield pair
            else:
                dropped[reason] += 1


def _first_reason(clean: Clean) -> Callable[[Pair], str | None]:
    """Returns the test of one run through the pairs: repeats are those within the run."""
    keys: set[bytes] = set()

    def reason(pair: Pair) -> str | None:
        shorter, longer = sorted((len(pair.source.strip()), len(pair.target.strip())))
        if unreadable := _unreadable(pair):
            return unreadable
        if clean.drops_empty and not shorter:
            return _EMPTY
        if clean.drops_control_characters and any(map(_CONTROL.search, pair)):
            return _CONTROL_CHARACTERS
        if clean.min_characters is not None and shorter < clean.min_characters:
            return _SHORT
        if clean.max_characters is not None and longer > clean.max_characters:
            return _LONG
        if clean.max_ratio is not None and longer > clean.max_ratio * shorter:
            return _UNEQUAL
        if clean.drops_duplicates:
            text = f"{len(pair.source)} {pair.source}{pair.target}"  # a prompt may hold any sign
            key = hashlib.blake2b(text.encode(), digest_size=8).digest()
            if key in keys:
                return _REPEAT
            keys.add(key)
        return None

    return reason


def _unreadable(pair: Pair) -> str | None:
    return _NOT_UTF8 if any(map(LONE_SURROGATE.search, pair)) else None
