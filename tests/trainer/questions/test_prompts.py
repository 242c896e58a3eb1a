"""Prompts: their template, the shots, and which questions are left to score."""

import pytest

from configs.errors import UserError
from tests.trainer.questions.toy import TASK, VOCAB, VOCABS
from trainer.questions.prompts import Template, draw_shots, make_prompts, scored_questions
from trainer.questions.questions import Question

QUESTIONS = [Question(i, f"q{i}", (f"a{i}", "other")) for i in range(1, 7)]


def test_a_prompt_has_its_shots_in_front() -> None:
    template = Template.parse(r"Q: {question}\nA: {answer}\n\n")
    [prompt] = make_prompts(template, QUESTIONS[:2], QUESTIONS[2:3], TASK, VOCABS)
    assert prompt.text == "Q: q1\nA: a1\n\nQ: q2\nA: a2\n\nQ: q3\nA:"
    assert VOCAB.decode(prompt.tokens) == prompt.text


@pytest.mark.parametrize(
    ("written", "answer"),
    [
        (" Paris\nQ: next", "Paris"),
        (" Paris ; Rome", "Paris"),
        ("\nParis", ""),
        (" Paris", "Paris"),
    ],
)
def test_an_answer_ends_with_its_line_or_as_in_the_template(written: str, answer: str) -> None:
    assert Template.parse("{question} = {answer} ; ").answer_of(written) == answer


@pytest.mark.parametrize("text", ["{answer}", "{question} {question}", "{answer} {question}", ""])
def test_a_template_without_its_parts_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="--template"):
        Template.parse(text)


def test_shots_follow_their_seed_and_fewer_are_the_first_of_more() -> None:
    four = draw_shots(QUESTIONS, 4, 0, "f")
    assert draw_shots(QUESTIONS, 2, 0, "f") == four[:2]
    assert draw_shots(QUESTIONS, 4, 1, "f") != four
    with pytest.raises(UserError, match="--shots=7: f has 6"):
        draw_shots(QUESTIONS, 7, 0, "f")


def test_a_question_that_a_shot_answers_is_not_scored() -> None:
    again = Question(9, "q1", ("a1",))
    assert scored_questions([*QUESTIONS[:2], again], QUESTIONS[:1], "f") == [QUESTIONS[1]]
    with pytest.raises(UserError, match="among the 6 shots"):
        scored_questions(QUESTIONS, QUESTIONS, "f")
