"""Answers questions by the likelihood of each choice."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jax.sharding import Mesh

from configs.errors import UserError, listed
from data.packing import pack
from data.packing.pair_rows import PairRows
from data.packing.rows import Counts, Rows
from data.task import Task
from data.tasks.prompts import PromptRows
from data.vocabs import Vocabs
from models.api import Model, Params
from trainer.decoding.decoder import Ids
from trainer.decoding.score import row_losses
from trainer.evaluate import Progress, no_progress
from trainer.questions.prompts import Prompt, Template, encode_prompts


class Completion(NamedTuple):
    """Holds the tokens of a prompt and one of its choices."""

    source: Ids | None
    """What the encoder reads, where there is one, without its end."""
    target: Ids
    scored: slice
    """Which tokens are of the choice; behind those of the target comes the end."""


class Likelihood(NamedTuple):
    """Holds the log-likelihood of a choice, given its question."""

    log_likelihood: float
    tokens: int
    characters: int

    @property
    def per_token(self) -> float:
        """Returns the mean of its tokens, as Brown et al. 2020 (GPT-3), section 2.4, compare."""
        return self.log_likelihood / self.tokens

    @property
    def per_character(self) -> float:
        """Returns the mean of its characters, whatever the tokenizer."""
        return self.log_likelihood / self.characters


def make_completions(
    prompts: Sequence[Prompt], template: Template, task: Task, vocabs: Vocabs
) -> list[list[Completion]]:
    """Returns a completion for each choice of each question.

    A decoder's are scored from the first token on in which the prompt and its choices differ, so
    that all are given the same tokens; an encoder has read the prompt, and the end is scored too.
    """
    if task.has_source:
        targets = iter(vocabs.target.encode([c for p in prompts for c in p.question.choices]))
        return [
            [
                Completion(prompt.tokens, ids, slice(0, len(ids) + 1))
                for _, ids in zip(prompt.question.choices, targets, strict=False)
            ]
            for prompt in prompts
        ]
    texts = [p.text + template.space + choice for p in prompts for choice in p.question.choices]
    encoded = iter(encode_prompts(texts, task, vocabs, None))
    completions = []
    for prompt in prompts:
        ids_of_choices = [next(encoded) for _ in prompt.question.choices]
        start = shared_prefix([prompt.tokens, *ids_of_choices])
        # A choice after no token at all follows begin_id, whatever a decoder reads before prompts.
        begins = [vocabs.target.begin_id] if start == 0 and not vocabs.target.reads_begin else []
        completions.append(
            [
                Completion(
                    None, [*begins, *ids], slice(start + len(begins), len(begins) + len(ids))
                )
                for ids in ids_of_choices
            ]
        )
    return completions


def shared_prefix(texts: Sequence[Ids]) -> int:
    """Returns how many tokens all the texts begin with.

    >>> shared_prefix([[5, 7], [5, 7, 9], [5, 8]])
    1
    """
    same = [len(set(map(int, tokens))) == 1 for tokens in zip(*texts, strict=False)]
    return [*same, False].index(False)


def check_choices_fit(
    path: str, prompts: Sequence[Prompt], completions: Sequence[Sequence[Completion]], task: Task
) -> None:
    """Refuses questions that are longer, with a choice, than the model's rows."""
    problems, source_length = list[str](), task.row_lengths.get("source_length", math.inf)
    for prompt, of_prompt in zip(prompts, completions, strict=True):
        place = f"{path}:{prompt.question.line}"
        longest = max(len(completion.target) for completion in of_prompt) + 1
        if empty := [i for i, one in enumerate(of_prompt) if one.scored.stop <= one.scored.start]:
            problems.append(f"{place}: choice {empty[0]} has no token.  Write it with other signs.")
        if longest > task.length:
            problems.append(
                f"{place}: {longest} tokens of the longest choice, with what it follows and its "
                f"end, do not fit the model's row of {task.length}.  Shorten the question, or "
                "lower --shots."
            )
        if task.has_source and len(prompt.tokens) + 1 > source_length:
            problems.append(
                f"{place}: {len(prompt.tokens)} tokens of the prompt and its end do not fit the "
                f"model's source row of {source_length}.  Shorten the question, or lower --shots."
            )
    if problems:
        raise UserError(listed(path, problems))


def choice_likelihoods(
    model: Model,
    params: Params,
    mesh: Mesh,
    prompts: Sequence[Prompt],
    completions: Sequence[Sequence[Completion]],
    task: Task,
    vocabs: Vocabs,
    batch_sequences: int,
    progress: Progress = no_progress,
) -> list[list[Likelihood]]:
    """Computes the likelihood of each choice of each question, packed as in training."""
    flat = [completion for of_prompt in completions for completion in of_prompt]
    rows = rows_of(flat, task, vocabs)
    losses_BL, _ = row_losses(model, params, rows, mesh, batch_sequences, progress)
    assert rows.pieces is not None
    totals = np.zeros(len(flat))
    unread = 0 if task.has_source or vocabs.target.reads_begin else 1
    for i, row, segment in rows.pieces:
        losses, scored = losses_BL[row, rows.segments_BL[row] == segment], flat[i].scored
        totals[i] = -losses[scored.start - unread : scored.stop - unread].sum()
    summed = zip(totals.tolist(), flat, strict=True)
    return [
        [
            Likelihood(total, one.scored.stop - one.scored.start, len(choice))
            for choice, (total, one) in zip(prompt.question.choices, summed, strict=False)
        ]
        for prompt in prompts
    ]


def rows_of(completions: Sequence[Completion], task: Task, vocabs: Vocabs) -> Rows:
    """Packs completions into rows of the task."""
    target = vocabs.target
    sides = [pack.Side(task.length, target.dtype, target.end_id)]
    halves = [[np.asarray(completion.target) for completion in completions]]
    if task.has_source:
        source, length = vocabs.of_source, task.row_lengths["source_length"]
        sides.append(pack.Side(length, source.dtype, source.end_id))
        halves.append([np.asarray(completion.source) for completion in completions])
    packer = pack.Packer(*sides, packs=task.packs)
    packed = pack.joined([packer.add(*halves), packer.finish()])
    if task.has_source:
        return PairRows(packed.arrays, Counts(), packed.pieces, begin_id=target.begin_id)
    arrays = {**packed.arrays, "loss_mask": np.minimum(packed.arrays["segments"], 1)}
    return PromptRows(
        arrays, Counts(), packed.pieces, begin_id=target.begin_id, reads_begin=target.reads_begin
    )
