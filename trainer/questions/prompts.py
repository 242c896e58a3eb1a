"""Writes the prompts of questions: some answered ones, then the question to answer."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from configs.errors import UserError, listed
from data.sources.pairs import chosen_tag, tagged
from data.task import Task
from data.vocabs import Vocabs
from trainer.decoding.decoder import Decoder, Ids, Request
from trainer.decoding.requests import check_tag
from trainer.evaluate import Progress, no_progress
from trainer.questions.questions import Question

QUESTION, ANSWER = "{question}", "{answer}"


@dataclasses.dataclass(frozen=True)
class Template:
    """Writes a question, and an answer behind it."""

    before: str
    """What the question follows."""
    between: str
    """What is between the question and the answer, without the white space at its end."""
    space: str
    """The white space in front of an answer, which belongs to its tokens."""
    after: str
    """What ends an answer that another question follows."""

    @classmethod
    def parse(cls, text: str) -> "Template":
        r"""Reads a text with {question} and {answer}, in which \n and \t are a new line and a tab.

        >>> Template.parse("{question} ->")
        Template(before='', between=' ->', space=' ', after='\n\n')
        """
        text = text.replace(r"\n", "\n").replace(r"\t", "\t")
        if ANSWER not in text:
            text += f" {ANSWER}\n\n"
        if text.count(QUESTION) != 1 or text.count(ANSWER) != 1:
            raise UserError(
                f"--template={text!r}: it has {QUESTION} {text.count(QUESTION)} times and {ANSWER} "
                f"{text.count(ANSWER)} times.  Give each once, such as 'Q: {QUESTION} A: {ANSWER}'."
            )
        head, after = text.split(ANSWER)
        if QUESTION not in head:
            raise UserError(f"--template={text!r}: {ANSWER} is in front of {QUESTION}.")
        before, between = head.split(QUESTION)
        kept = between.rstrip(" ")
        return cls(before, kept, between[len(kept) :], after)

    def unanswered(self, question: Question) -> str:
        """Writes a question, up to where its answer begins."""
        return f"{self.before}{question.text}{self.between}"

    def answered(self, question: Question) -> str:
        """Writes a question with the first of its answers."""
        return f"{self.unanswered(question)}{self.space}{question.answers[0]}{self.after}"

    def answer_of(self, continuation: str) -> str:
        """Cuts what a model writes at the end of its line, or at what ends an answer."""
        for end in ("\n", self.after.strip()):
            continuation = continuation.split(end)[0] if end else continuation
        return continuation.strip()


def draw_shots(questions: Sequence[Question], shots: int, seed: int, path: str) -> list[Question]:
    """Draws questions to answer in the prompt; fewer shots are the first of more."""
    if shots > len(questions):
        raise UserError(f"--shots={shots}: {path} has {len(questions)} questions.")
    order = np.random.default_rng(seed).permutation(len(questions))
    return [questions[i] for i in order[:shots]]


def scored_questions(
    questions: Sequence[Question], shots: Sequence[Question], path: str
) -> list[Question]:
    """Returns the questions that the prompt does not answer."""
    answered = {shot.text for shot in shots}
    scored = [question for question in questions if question.text not in answered]
    if not scored:
        raise UserError(
            f"{path}: all {len(questions)} questions are among the {len(shots)} shots.  Lower "
            "--shots, or take them from another file with --shots_from."
        )
    return scored


class Prompt(NamedTuple):
    """Holds what a model reads of one question."""

    question: Question
    text: str
    tokens: Ids


def make_prompts(
    template: Template,
    shots: Sequence[Question],
    questions: Sequence[Question],
    task: Task,
    vocabs: Vocabs,
    tag: str | None = None,
) -> list[Prompt]:
    """Writes and encodes the prompt of each question, with the same shots in front of each."""
    answered = "".join(map(template.answered, shots))
    texts = [answered + template.unanswered(question) for question in questions]
    encoded = encode_prompts(texts, task, vocabs, tag)
    return [Prompt(*prompt) for prompt in zip(questions, texts, encoded, strict=True)]


def encode_prompts(
    texts: Sequence[str], task: Task, vocabs: Vocabs, tag: str | None
) -> list[np.ndarray]:
    """Returns the tokens of prompts, which the encoder reads where the task has a source."""
    check_tag(tag, task)
    if not task.has_source:
        return vocabs.target.encode(texts)
    tag = chosen_tag(tag, task.tags)
    return vocabs.of_source.encode([tagged(text, tag) for text in texts])


def check_answers_fit(
    path: str, prompts: Sequence[Prompt], task: Task, max_new_tokens: int
) -> None:
    """Refuses questions that are longer than the rows the model was trained on."""
    if task.has_source:
        length, row, answer, name = task.row_lengths["source_length"], "source row", 1, "its end"
        if max_new_tokens > task.length:
            raise UserError(
                f"--max_tokens={max_new_tokens}: a row of the model has {task.length} tokens."
            )
    else:
        length, row, answer = task.length, "row", max_new_tokens
        name = "the answer (--max_tokens)"
    problems = [
        f"{path}:{prompt.question.line}: {len(prompt.tokens)} tokens of the prompt and {answer} of "
        f"{name} do not fit the model's {row} of {length}.  Shorten the question, or lower "
        "--shots or --max_tokens."
        for prompt in prompts
        if len(prompt.tokens) + answer > length
    ]
    if problems:
        raise UserError(listed(path, problems))


def answer_questions(
    decoder: Decoder,
    prompts: Sequence[Prompt],
    template: Template,
    task: Task,
    vocabs: Vocabs,
    max_new_tokens: int,
    progress: Progress = no_progress,
) -> list[str]:
    """Returns the answer to each question, of at most `max_new_tokens` tokens."""
    answers, done = [""] * len(prompts), 0
    for batch in decoder.decode(answer_requests(prompts, task, vocabs, max_new_tokens)):
        for i, hypotheses in batch:
            answers[i] = template.answer_of(vocabs.target.decode(hypotheses[0].tokens))
        done += len(batch)
        progress(done, len(prompts))
    return answers


def answer_requests(
    prompts: Sequence[Prompt], task: Task, vocabs: Vocabs, max_new_tokens: int
) -> list[Request]:
    """Returns what to decode: behind each prompt, or from it where the model has an encoder."""
    if not task.has_source:
        return [Request(prompt.tokens, max_new_tokens) for prompt in prompts]
    end_id = vocabs.of_source.end_id
    return [
        Request([], max_new_tokens, source=[*map(int, prompt.tokens), end_id]) for prompt in prompts
    ]
