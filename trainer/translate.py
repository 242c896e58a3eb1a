"""Translates the held-out pairs of a task and measures what comes out, on raw text."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

from data.pairs import Pair
from data.task import Translation
from data.vocabs import Vocabs
from trainer.decode import Decoder
from trainer.quality import Quality, quality
from trainer.text import Options, Say, requests_of, texts_of

Report = Callable[[int, int], None]


class HeldOut(NamedTuple):
    """The pairs of one part of a task, as they stand in its files."""

    name: str
    tag: str | None
    pairs: list[Pair]


class Translated(NamedTuple):
    """What a model made of a part, and how good it is."""

    part: HeldOut
    texts: list[str]
    quality: Quality


def held_out(task: Translation, split: str, sentences: int | None = None) -> list[HeldOut]:
    """The pairs of a split, part by part, or so many of them, evenly spread over the whole."""
    parts = [
        HeldOut(name, part.tag, list(part.untagged(split, task.clean.errors)))
        for name, part in task.source.parts_of(split).items()
    ]
    total = sum(len(part.pairs) for part in parts)
    if sentences is None or sentences >= total:
        return parts
    place, kept = 0, []
    for part in parts:
        chosen = [
            pair
            for i, pair in enumerate(part.pairs, place)
            if i * sentences // total != (i + 1) * sentences // total
        ]
        place += len(part.pairs)
        kept.append(part._replace(pairs=chosen))
    return [part for part in kept if part.pairs]


def translate(
    decoder: Decoder,
    parts: Sequence[HeldOut],
    task: Translation,
    vocabs: Vocabs,
    options: Options,
    most_places: int | None,
    *,
    say: Say,
    tokenize: str | None = None,
    resamples: int = 1000,
    report: Report = lambda done, total: None,
) -> list[Translated]:
    """Each part with its translations; where there are several, all of them together come last."""
    total, before, found = sum(len(part.pairs) for part in parts), 0, []
    for part in parts:
        sources = [pair.source for pair in part.pairs]
        own = dataclasses.replace(options, tag=part.tag)
        requests = requests_of(sources, task, vocabs, own, most_places, say)

        def shown(done: int, _: int, before: int = before) -> None:
            report(before + done, total)

        texts = texts_of(decoder, requests, vocabs, own, shown)
        before += len(sources)
        found.append((part, texts))
    if len(found) > 1:
        everything = HeldOut("all", None, [pair for part in parts for pair in part.pairs])
        found.append((everything, [text for _, texts in found for text in texts]))
    return [
        Translated(
            part,
            texts,
            quality(
                texts,
                [[pair.target for pair in part.pairs]],
                tokenize=tokenize,
                resamples=resamples,
                ter=resamples > 0,
            ),
        )
        for part, texts in found
    ]
