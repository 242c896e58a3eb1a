"""Translates the held-out pairs of a task and measures what comes out, on raw text."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

from data.task import Task
from data.vocabs import Vocabs
from trainer.decoding.decoder import Decoder
from trainer.decoding.requests import Options, Say, requests_of, texts_of
from trainer.translation.metrics import Quality, quality

Report = Callable[[int, int], None]


class HeldOut(NamedTuple):
    """Sources of one part of a task and their references, as they stand in its files."""

    name: str
    tag: str | None
    sources: list[str]
    references: list[list[str]]
    """One or more whole references, each with a text for every source."""

    def some(self, places: Sequence[int]) -> "HeldOut":
        """Only those sentences."""
        references = [[whole[i] for i in places] for whole in self.references]
        return self._replace(sources=[self.sources[i] for i in places], references=references)


class Translated(NamedTuple):
    """What a model made of a part, and how good it is."""

    part: HeldOut
    texts: list[str]
    quality: Quality


def held_out(task: Task, split: str) -> list[HeldOut]:
    """The pairs of a split, part by part."""
    return [
        HeldOut(name, tag, [pair.source for pair in pairs], [[pair.target for pair in pairs]])
        for name, tag, pairs in task.test_pairs(split)
    ]


def subset(parts: Sequence[HeldOut], sentences: int) -> list[HeldOut]:
    """So many sentences, evenly spread over all parts."""
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
    parts: Sequence[HeldOut],
    task: Task,
    vocabs: Vocabs,
    options: Options,
    max_length: int | None,
    *,
    say: Say,
    tokenize: str | None = None,
    resamples: int = 1000,
    ter: bool = True,
    report: Report = lambda done, total: None,
) -> list[Translated]:
    """Each part with its translations; where there are several, all of them together come first."""
    total, before, found = sum(len(part.sources) for part in parts), 0, []
    for part in parts:
        own = dataclasses.replace(options, tag=part.tag)

        def say_whose(line: str, name: str = part.name) -> None:
            say(f"{name}: {line}" if len(parts) > 1 else line)

        def shown(done: int, _: int, before: int = before) -> None:
            report(before + done, total)

        requests = requests_of(part.sources, task, vocabs, own, max_length, say_whose)
        found.append((part, texts_of(decoder, requests, vocabs, own, shown)))
        before += len(part.sources)
    if len(found) > 1:
        sources = [source for part, _ in found for source in part.sources]
        references = [text for part, _ in found for text in part.references[0]]
        texts = [text for _, own_texts in found for text in own_texts]
        found = [(HeldOut("all", None, sources, [references]), texts), *found]
    return [
        Translated(
            part,
            texts,
            quality(texts, part.references, tokenize=tokenize, resamples=resamples, ter=ter),
        )
        for part, texts in found
    ]
