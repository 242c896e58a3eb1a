"""Files of questions: the formats of the benchmarks, and what is wrong in which line."""

import json
from typing import Any

import pytest

from configs.errors import UserError
from trainer.questions.questions import Question, parse_questions


def parse(*entries: Any, answer_field: str | None = None) -> list[Question]:
    lines = [entry if isinstance(entry, str) else json.dumps(entry) for entry in entries]
    return parse_questions("f", lines, answer_field)


@pytest.mark.parametrize(
    "entry",
    [
        {"answer": ["one", "1", "one"]},  # NQ-open
        {"url": "www", "answers": ["one", "1"]},  # WebQuestions
        {"answer": {"value": "one", "aliases": ["1"], "type": "Numerical"}},  # TriviaQA
    ],
)
def test_the_formats_of_the_benchmarks_are_read(entry: dict[str, Any]) -> None:
    assert parse("", {"question": " how many ", **entry}) == [Question(2, "how many", ("one", "1"))]


def test_another_field_may_hold_the_answers() -> None:
    entry = {"question": "q", "answer": ["x"], "right": ["y"]}
    assert parse(entry, answer_field="right")[0].answers == ("y",)


def test_choices_are_read() -> None:
    [question] = parse({"question": "q", "choices": ["x", "y"], "answer": 1})
    assert (question.answers, question.choices, question.right_choice) == (("y",), ("x", "y"), 1)


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[1]", "should be an object"),
        ({"answer": "x"}, 'there is no "question".  Found: answer.'),
        ({"question": "q"}, 'there is no "answer"'),
        ({"question": " ", "answer": "x"}, "blank"),
        ({"question": "q", "answer": []}, '"answer" holds no answer'),
        ({"question": "q", "answer": [""]}, "blank"),
        ({"question": "q", "answer": [1988]}, "1988, which is not a text"),
        ({"question": "q", "answer": None}, "null, not a list"),
        ({"question": "q", "answer": "\ud800"}, "surrogate"),
        ({"question": "q", "choices": ["x", "y"], "answer": 2}, "an index from 0 to 1"),
        ({"question": "q", "choices": ["x", "y"], "answer": -1}, "an index from 0 to 1"),
        ({"question": "q", "choices": ["x", "y"], "answer": True}, "an index from 0 to 1"),
        ({"question": "q", "choices": ["x", "y"], "answer": "x"}, "an index from 0 to 1"),
        ({"question": "q", "choices": ["x", "x"], "answer": 0}, "1 of them different"),
        ({"question": "q", "choices": ["x"], "answer": 0}, "Give two or more"),
        ({"question": "q", "choices": "xy", "answer": 0}, "not a list"),
        ({"question": "q", "choices": ["x", "y"], "answer": 0}, "line 2 has choices and line 1"),
    ],
)
def test_what_is_wrong_names_its_line(entry: Any, expected: str) -> None:
    with pytest.raises(UserError) as raised:
        parse({"question": "fine", "answer": "x"}, entry)
    assert str(raised.value).startswith("f:2: ") and expected in str(raised.value)


def test_all_problems_are_listed_and_no_question_is_one() -> None:
    with pytest.raises(UserError, match="f: 2 problems"):
        parse("{", "{}")
    with pytest.raises(UserError, match="there is no question"):
        parse("", " ")
