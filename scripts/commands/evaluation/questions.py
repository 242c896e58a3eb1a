"""Runs `meshloom evaluate --questions`: measures how many questions a model answers."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

from configs.errors import UserError
from scripts.commands.common import input_lines, write_json
from scripts.commands.decoding.decode import decoder_of, trace_fns_of
from scripts.commands.evaluation.flags import EvaluateFlags, QuestionFlags
from scripts.commands.shared_flags import SearchFlags
from scripts.commands.trained import batch_of, trained_models
from scripts.flag import given_flags
from scripts.terminal import print_note, print_table, progress_bar
from trainer.checkpoints.restore import TrainedModel, chosen_steps
from trainer.checks import TraceFn
from trainer.questions import choices
from trainer.questions.prompts import (
    Prompt,
    Template,
    answer_questions,
    check_answers_fit,
    draw_shots,
    make_prompts,
    scored_questions,
)
from trainer.questions.questions import Question, Share, is_exact_match, parse_questions
from trainer.run import Run
from trainer.traces import trace_score_step

MAX_NEW_TOKENS = 32  # 99 % of the answers of NQ-open have at most 34 characters

SHARED_FLAGS = ("--batch_sequences", "--json", "--tag")


class Scores(NamedTuple):
    """Holds the shares of right answers by the name of the measure, and an entry a question."""

    shares: dict[str, Share]
    entries: list[dict[str, Any]]


class AnswerTest(NamedTuple):
    """Holds the questions that one call evaluates, and how their prompts are written."""

    path: str
    template: Template
    shots: list[Question]
    questions: list[Question]

    @property
    def has_choices(self) -> bool:
        return bool(self.questions[0].choices)


def evaluate_questions(flags: EvaluateFlags) -> list[dict[str, Any]]:
    """Measures the share of right answers of checkpoints."""
    given = [name for group in (flags, flags.text, flags.metrics) for name in given_flags(group)]
    if of_texts := [name for name in given if name not in SHARED_FLAGS]:
        raise UserError(f"{', '.join(of_texts)}: not with --questions.  Remove one of them.")
    test = read_test(flags.questions)

    def trace_fns(run: Run) -> list[TraceFn]:
        return [trace_score_step] if test.has_choices else trace_fns_of(search_flags(flags))(run)

    with trained_models(flags.model, trace_fns) as models:
        steps = chosen_steps(models.checkpoints, flags.model.checkpoint)
        task, vocabs = models.run.task, models.vocabs
        prompts = make_prompts(
            test.template, test.shots, test.questions, task, vocabs, flags.text.tag
        )
        completions = list[list[choices.Completion]]()
        if test.has_choices:
            completions = choices.make_completions(prompts, test.template, task, vocabs)
            choices.check_choices_fit(test.path, prompts, completions, task)
        else:
            check_answers_fit(test.path, prompts, task, max_new_tokens(flags))
        for prompt in prompts[: flags.questions.show_prompts]:
            question = prompt.question
            print(f"Prompt of line {question.line} ({len(prompt.tokens)} tokens):")
            print(prompt.text)
            answers = " | ".join(question.choices or question.answers)
            print(f"{'Choices' if question.choices else 'Answers'}: {answers}\n")
        lines = []
        for step in steps:
            trained = models.restore(step, flags.model.average)
            scores = (
                score_choices(trained, prompts, completions, flags)
                if test.has_choices
                else score_answers(trained, test, prompts, flags)
            )
            lines.append(result_of(trained.step, scores, test, flags))
    # The shares with their 95 % intervals.
    names = [name for name in lines[0] if name.startswith(("exact_match", "accuracy"))]
    rows = [
        [line["step"], line["questions"], len(test.shots), *(str(Share(**line[n])) for n in names)]
        for line in lines
    ]
    headers = [f"{name.replace('_', ' ')} [95 %]" for name in names]
    print_table(["step", "questions", "shots", *headers], rows)
    write_json(flags.json_file, lines if len(steps) > 1 else lines[0])
    return lines


def read_test(flags: QuestionFlags) -> AnswerTest:
    """Reads the questions and draws the shots."""
    assert flags.questions is not None
    questions = parse_questions(flags.questions, input_lines(flags.questions), flags.answer_field)
    source, path = questions, flags.questions
    if flags.shots_from is not None:
        path = flags.shots_from
        source = parse_questions(path, input_lines(path), flags.answer_field)
        if bool(source[0].choices) != bool(questions[0].choices):
            raise UserError(
                f"{path} and {flags.questions}: only one of them has questions with choices."
            )
    shots = draw_shots(source, flags.shots, flags.shots_seed, path)
    scored = scored_questions(questions, shots, flags.questions)
    if left_out := len(questions) - len(scored):
        print_note(f"{left_out:,} of {len(questions):,} questions are among the shots.")
    return AnswerTest(flags.questions, Template.parse(flags.template), shots, scored)


def search_flags(flags: EvaluateFlags) -> SearchFlags:
    """Returns the search of every task: greedy unless a beam is given."""
    search = SearchFlags(**dataclasses.asdict(flags.search))
    return dataclasses.replace(search, beam=search.beam or 1)


def max_new_tokens(flags: EvaluateFlags) -> int:
    return flags.search.max_tokens or MAX_NEW_TOKENS


def score_answers(
    trained: TrainedModel, test: AnswerTest, prompts: Sequence[Prompt], flags: EvaluateFlags
) -> Scores:
    """Compares the model's answers with the accepted ones."""
    decoder = decoder_of([trained], search_flags(flags), flags.batch_sequences)
    with progress_bar("answer") as update:
        answers = answer_questions(
            decoder, prompts, test.template, trained.run.task, trained.vocabs,
            max_new_tokens(flags), update,
        )  # fmt: skip
    entries = [
        entry_of(prompt)
        | {
            "answers": prompt.question.answers,
            "prediction": answer,
            "is_right": is_exact_match(
                answer, prompt.question.answers, flags.questions.normalization
            ),
        }
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    return Scores({"exact_match": Share.of([entry["is_right"] for entry in entries])}, entries)


def score_choices(
    trained: TrainedModel,
    prompts: Sequence[Prompt],
    completions: Sequence[Sequence[choices.Completion]],
    flags: EvaluateFlags,
) -> Scores:
    """Predicts the most likely choice of each question: in all, per token and per character."""
    with progress_bar("score") as update:
        likelihoods = choices.choice_likelihoods(
            trained.model, trained.params, trained.mesh, prompts, completions, trained.run.task,
            trained.vocabs, batch_of(trained, flags.batch_sequences), update,
        )  # fmt: skip
    entries = [
        entry_of(prompt) | choice_entry(prompt.question, of_prompt)
        for prompt, of_prompt in zip(prompts, likelihoods, strict=True)
    ]
    shares = {
        f"accuracy{name}": Share.of([entry[f"is_right{name}"] for entry in entries])
        for name in ("", "_per_token", "_per_character")
    }
    return Scores(shares, entries)


def choice_entry(question: Question, likelihoods: Sequence[choices.Likelihood]) -> dict[str, Any]:
    """Returns the likelihoods of the choices of a question; of equal ones, the first wins."""
    by_measure = {
        "": [one.log_likelihood for one in likelihoods],
        "_per_token": [one.per_token for one in likelihoods],
        "_per_character": [one.per_character for one in likelihoods],
    }
    entry: dict[str, Any] = {
        "choices": question.choices,
        "answer": question.right_choice,
        "log_likelihoods": by_measure[""],
        "tokens": [one.tokens for one in likelihoods],
    }
    for name, values in by_measure.items():
        prediction = values.index(max(values))
        entry[f"prediction{name}"] = prediction
        entry[f"is_right{name}"] = prediction == question.right_choice
    return entry


def entry_of(prompt: Prompt) -> dict[str, Any]:
    question = prompt.question
    return {"line": question.line, "question": question.text, "prompt_tokens": len(prompt.tokens)}


def result_of(step: int, scores: Scores, test: AnswerTest, flags: EvaluateFlags) -> dict[str, Any]:
    """Returns the JSON object of one checkpoint."""
    settings = {
        **dataclasses.asdict(flags.questions),
        **dataclasses.asdict(flags.search),
        "beam": search_flags(flags).beam,
        "max_tokens": max_new_tokens(flags),
        "average": flags.model.average,
        "tag": flags.text.tag,
    }
    return {
        "step": step,
        "questions": len(test.questions),
        **{name: share._asdict() for name, share in scores.shares.items()},
        "settings": settings,
        "shots": [{"line": shot.line, "text": test.template.answered(shot)} for shot in test.shots],
        "predictions": scores.entries,
    }
