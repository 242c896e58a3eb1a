"""Reads questions with accepted answers or choices from JSON lines; measures answers."""

import dataclasses
import json
import math
import re
import string
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from configs.errors import UserError, brief, did_you_mean, listed
from configs.json_reader import read_json
from data.sources.text_files import LONE_SURROGATE

ANSWER_FIELDS = ("answer", "answers")
EXAMPLES = (
    'Legal: {"question": "…", "answer": ["…", "…"]}, or {"question": "…", "choices": ["…", "…"], '
    '"answer": 0}.'
)


@dataclasses.dataclass(frozen=True)
class Question:
    """Holds a question of a file."""

    line: int
    """Its number in the file, from 1."""
    text: str
    answers: tuple[str, ...]
    """What is accepted; among choices, the right one."""
    choices: tuple[str, ...] = ()
    """None where the answer is free text."""

    @property
    def right_choice(self) -> int:
        """Returns the index of the right choice."""
        return self.choices.index(self.answers[0])


def parse_questions(
    path: str, lines: Iterable[str], answer_field: str | None = None
) -> list[Question]:
    """Parses a question a line, all with choices or all without; blank lines are none.

    An answer is a text, a list of texts, or TriviaQA's object with a value and its aliases; among
    choices it is an index, from 0.
    """
    questions, problems = list[Question](), list[str]()
    for number, line in enumerate(lines, 1):
        if not line or line.isspace():
            continue
        try:
            questions.append(_question(number, line, answer_field))
        except ValueError as error:
            problems.append(f"{path}:{number}: {error}")
    with_choices = [question.line for question in questions if question.choices]
    without = [question.line for question in questions if not question.choices]
    if with_choices and without:
        problems.append(
            f"{path}:{max(with_choices[0], without[0])}: line {with_choices[0]} has choices and "
            f"line {without[0]} has none.  Make two files."
        )
    if not questions and not problems:
        problems.append(f"{path}: there is no question.  {EXAMPLES}")
    if problems:
        raise UserError(listed(path, problems))
    return questions


def _question(number: int, line: str, answer_field: str | None) -> Question:
    """Parses one line; raises ValueError with what is wrong."""
    try:
        entry = read_json(line, dict[str, Any], brief(line, 40))
    except UserError as error:
        raise ValueError(f"{error}  {EXAMPLES}") from None
    text = _text(entry.get("question"), entry, "question")
    name = _answer_field(entry, answer_field)
    if "choices" not in entry:
        return Question(number, text, _answers(entry[name], name))
    choices = _texts(entry["choices"], "choices")
    if len(set(choices)) < max(2, len(choices)):
        raise ValueError(
            f'"choices" holds {len(choices)} texts, {len(set(choices))} of them different.  '
            "Give two or more, each once."
        )
    return Question(number, text, (choices[_index(entry[name], name, len(choices))],), choices)


def _answer_field(entry: Mapping[str, Any], answer_field: str | None) -> str:
    """Returns the name of the field with the answers."""
    names = ANSWER_FIELDS if answer_field is None else (answer_field,)
    for name in names:
        if name in entry:
            return name
    hint = "" if answer_field is None else did_you_mean(answer_field, entry)
    raise ValueError(f'there is no "{names[0]}".{hint}  Found: {_names(entry)}.  {EXAMPLES}')


def _answers(value: object, name: str) -> tuple[str, ...]:
    if isinstance(value, dict) and "value" in value:
        aliases = value.get("aliases", [])
        value = [value["value"], *(aliases if isinstance(aliases, list) else [aliases])]
    answers = _texts([value] if isinstance(value, str) else value, name)
    if not answers:
        raise ValueError(f'"{name}" holds no answer.  Give one or more accepted texts.')
    return tuple(dict.fromkeys(answers))


def _index(value: object, name: str, choices: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < choices:
        raise ValueError(
            f'"{name}" is {brief(json.dumps(value), 40)}: the right one of {choices} choices is '
            f"an index from 0 to {choices - 1}."
        )
    return value


def _texts(value: object, name: str) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise ValueError(f'"{name}" is {brief(json.dumps(value), 40)}, not a list of texts.')
    return tuple(_text(text, {}, name) for text in value)


def _text(value: object, entry: Mapping[str, Any], name: str) -> str:
    """Returns a text without the white space around it; refuses other values."""
    if value is None and entry:
        raise ValueError(f'there is no "{name}".  Found: {_names(entry)}.  {EXAMPLES}')
    if not isinstance(value, str):
        raise ValueError(f'"{name}" holds {brief(json.dumps(value), 40)}, which is not a text.')
    if not value.strip():
        raise ValueError(f'"{name}" holds a blank text.')
    if LONE_SURROGATE.search(value):
        raise ValueError(f'"{name}" holds half of a surrogate pair, which is not a character.')
    return value.strip()


def _names(entry: Mapping[str, Any]) -> str:
    return brief(", ".join(entry), 80) or "nothing"


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
