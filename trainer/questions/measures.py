"""Compares answers with the accepted ones, and measures the share of right ones."""

import math
import re
import string
from collections.abc import Sequence
from typing import Literal, NamedTuple

Normalization = Literal["squad", "triviaqa"]

_ARTICLES = re.compile(r"\b(a|an|the)\b")
# TriviaQA's script writes a space for punctuation, quotes and the underscore; SQuAD's removes it.
_PUNCTUATION: dict[Normalization, dict[int, str | None]] = {
    "squad": dict.fromkeys(map(ord, string.punctuation)),
    "triviaqa": dict.fromkeys(map(ord, string.punctuation + "\u2018\u2019\u00b4"), " "),
}
_QUANTILE = 1.959963984540054  # of the normal distribution, for 95 %


def normalize(text: str, normalization: Normalization = "squad") -> str:
    """Returns a text in lower case, without articles, punctuation and repeated white space.

    Rajpurkar et al. 2016 (SQuAD), section 6.1; Joshi et al. 2017 (TriviaQA).

    >>> normalize("The  Rock-n-Roll!"), normalize("The  Rock-n-Roll!", "triviaqa")
    ('rocknroll', 'rock n roll')
    """
    without = text.lower().translate(_PUNCTUATION[normalization])
    return " ".join(_ARTICLES.sub(" ", without).split())


def is_exact_match(
    prediction: str, answers: Sequence[str], normalization: Normalization = "squad"
) -> bool:
    """Returns whether a text is one of the accepted answers; nothing is none.

    >>> is_exact_match("december 1972.", ["14 December 1972 UTC", "December 1972"])
    True
    """
    normalized = normalize(prediction, normalization)
    return bool(prediction.strip()) and any(
        normalized == normalize(answer, normalization) for answer in answers
    )


class Share(NamedTuple):
    """Holds a share of right answers, with its 95 % interval."""

    share: float
    low: float
    high: float
    right: int
    total: int

    @classmethod
    def of(cls, right: Sequence[bool]) -> "Share":
        """Computes the share and its interval by Wilson's score (1927), right for few as well.

        >>> Share.of([True] * 3 + [False] * 7)
        Share(share=0.3, low=0.10779..., high=0.60322..., right=3, total=10)
        """
        count, total = sum(right), len(right)
        share, z2 = count / total, _QUANTILE**2 / total
        middle = share + z2 / 2
        half = math.sqrt(z2 * (share * (1 - share) + z2 / 4))
        low, high = ((middle + sign * half) / (1 + z2) for sign in (-1, 1))
        return cls(share, max(0.0, low), min(1.0, high), count, total)

    def __str__(self) -> str:
        return f"{self.share:.1%} [{self.low:.1%}, {self.high:.1%}]"
