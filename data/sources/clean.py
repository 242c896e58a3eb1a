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

_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")  # without \t, \n and \r, for prompts


@spec
class Clean:
    """Chooses which training pairs to drop; other splits stay complete and thus comparable.

    Lengths are in characters: not every language puts spaces between words, and there are no tokens
    before the vocab is trained.
    """

    drops_empty: bool = True
    """Drops a pair if one side is only whitespace."""
    drops_invalid_utf8: bool = False
    """Drops pairs that are not valid UTF-8, from every split; otherwise they are an error."""
    drops_control_characters: bool = False
    """Drops a pair with a control character on either side, other than tabs and line breaks."""
    drops_duplicates: bool = False
    """Drops a pair that occurred before in the same part of a mixture; about 100 bytes per pair."""
    min_characters: Count | None = None
    """Minimum number of characters on either side."""
    max_characters: Count | None = None
    """Maximum number of characters on either side."""
    max_ratio: Annotated[float, Field(ge=1)] | None = None
    """Maximum ratio of characters, longer side to shorter; clean-corpus-n.perl counts words."""

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

    def kept(self, pairs: Iterable[Pair], split: str, dropped: Counter[str]) -> Iterator[Pair]:
        """Yields the pairs of a split that are kept, and counts the dropped ones by reason.

        A reason that drops no pair counts 0.  Duplicates are detected within one call.
        """
        rules = self._rules(split)
        dropped.update(dict.fromkeys(rules, 0))
        for pair in pairs:
            reason = next((reason for reason, drops in rules.items() if drops(pair)), None)
            if reason is None:
                yield pair
            else:
                dropped[reason] += 1

    def _rules(self, split: str) -> dict[str, Callable[[Pair], bool]]:
        """Returns the enabled tests, by the reasons that tables and manifests show."""
        rules: dict[str, Callable[[Pair], bool]] = {}
        if self.drops_invalid_utf8:
            rules["not UTF-8"] = lambda pair: any(map(LONE_SURROGATE.search, pair))
        if split != "train":
            return rules
        if self.drops_empty:
            rules["an empty side"] = lambda pair: not _lengths(pair)[0]
        if self.drops_control_characters:
            rules["control characters"] = lambda pair: any(map(_CONTROL.search, pair))
        if (fewest := self.min_characters) is not None:
            rules["below min_characters"] = lambda pair: _lengths(pair)[0] < fewest
        if (limit := self.max_characters) is not None:
            rules["above max_characters"] = lambda pair: _lengths(pair)[1] > limit
        if (ratio := self.max_ratio) is not None:
            rules["above max_ratio"] = lambda pair: _lengths(pair)[1] > ratio * _lengths(pair)[0]
        if self.drops_duplicates:
            keys: set[bytes] = set()

            def is_repeat(pair: Pair) -> bool:
                # With lengths, as a prompt may contain any separator.
                text = "".join(f"{len(text)} {text}" for text in pair)
                key = hashlib.blake2b(text.encode(), digest_size=8).digest()
                is_known = key in keys
                keys.add(key)
                return is_known

            rules["a repeat"] = is_repeat
        return rules


def _lengths(pair: Pair) -> tuple[int, int]:
    """Returns the number of characters in the shortest text and in the longest one."""
    lengths = [len(text.strip()) for text in pair]
    return min(lengths), max(lengths)
