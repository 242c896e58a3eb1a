"""Translates evaluation sets of a task and computes metrics of the translations, on raw text."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

from data.task import Task
from data.vocabs import Vocabs
from trainer.decoding.decoder import Decoder
from trainer.decoding.requests import DecodeOptions, Say, best_texts, make_requests
from trainer.translation.metrics import TranslationMetrics, compute_metrics

Progress = Callable[[int, int], None]


class EvaluationSet(NamedTuple):
    """Holds sources of one part of a task and their references, as they stand in its files."""

    name: str
    tag: str | None
    sources: list[str]
    references: list[list[str]]
    """One or more whole references, each with a text for every source."""

    def some(self, places: Sequence[int]) -> "EvaluationSet":
        """Returns only those sentences."""
        references = [[whole[i] for i in places] for whole in self.references]
        return self._replace(sources=[self.sources[i] for i in places], references=references)


class TranslatedSet(NamedTuple):
    """Holds the translations of an evaluation set, and their metrics."""

    part: EvaluationSet
    texts: list[str]
    metrics: TranslationMetrics


def evaluation_sets(task: Task, split: str) -> list[EvaluationSet]:
    """Returns the pairs of a split, part by part."""
    return [
        EvaluationSet(name, tag, [pair.source for pair in pairs], [[pair.target for pair in pairs]])
        for name, tag, pairs in task.test_pairs(split)
    ]


def subset(parts: Sequence[EvaluationSet], sentences: int) -> list[EvaluationSet]:
    """Chooses so many sentences, evenly spread over all parts."""
    total = sum(len(part.sources) for part in parts)
    sentences, place, kept = min(sentences, total), 0, []
    for part in parts:
        span = range(place, place + len(part.sources))
        chosen = [i for i in span if i * sentences // total != (i + 1) * sentences // total]
        kept.append(part.some([i - place for i in chosen]))
        place += len(part.sources)
    return [part for part in kept if part.sources]


def translate(
    decoder: Decoder,
    parts: Sequence[EvaluationSet],
    task: Task,
    vocabs: Vocabs,
    options: DecodeOptions,
    max_length: int | None,
    *,
    say: Say,
    tokenize: str | None = None,
    resamples: int = 1000,
    ter: bool = True,
    progress: Progress = lambda done, total: None,
) -> list[TranslatedSet]:
    """Translates each part; where there are several, all of them together come first."""
    total, before, found = sum(len(part.sources) for part in parts), 0, []
    for part in parts:
        own = dataclasses.replace(options, tag=part.tag)

        def say_whose(line: str, name: str = part.name) -> None:
            say(f"{name}: {line}" if len(parts) > 1 else line)

        def update(done: int, _: int, before: int = before) -> None:
            progress(before + done, total)

        requests = make_requests(part.sources, task, vocabs, own, max_length, say_whose)
        found.append((part, best_texts(decoder, requests, vocabs, own, update)))
        before += len(part.sources)
    if len(found) > 1:
        sources = [source for part, _ in found for source in part.sources]
        references = [text for part, _ in found for text in part.references[0]]
        texts = [text for _, own_texts in found for text in own_texts]
        found = [(EvaluationSet("all", None, sources, [references]), texts), *found]
    return [
        TranslatedSet(
            part,
            texts,
            compute_metrics(
                texts, part.references, tokenize=tokenize, resamples=resamples, ter=ter
            ),
        )
        for part, texts in found
    ]
