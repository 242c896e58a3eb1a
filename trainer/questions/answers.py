"""Answers questions in a model's own words."""

from collections.abc import Sequence

from configs.errors import UserError, listed
from data.task import Task
from data.vocabs import Vocabs
from trainer.decoding.decoder import Decoder, Request
from trainer.evaluate import Progress, no_progress
from trainer.questions.prompts import Prompt, Template


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
    """Returns the answer to each question, with at most so many new tokens."""
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
