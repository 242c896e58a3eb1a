"""Translates evaluation sets and computes metrics on raw text; during training, BLEU."""

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jax.sharding import Mesh

from data.sources.text_files import in_one_line
from data.task import Task
from data.vocabs import Vocabs
from layouts.layout import Layout
from models.api import Params
from models.decoding.sampling import Sampling
from trainer.decoding.decoder import Decoder, prepared
from trainer.decoding.requests import DecodeOptions, LineDecoder
from trainer.evaluate import Progress, no_progress
from trainer.feed import whole_batch
from trainer.observers import Observer
from trainer.run import Run
from trainer.translation.metrics import TranslationMetrics, compute_metrics

logger = logging.getLogger(__name__)


class EvaluationSet(NamedTuple):
    """Holds the sources and references of one part of a task, unchanged from its files."""

    name: str
    tag: str | None
    sources: list[str]
    references: list[list[str]]
    """One or more complete references, each with a text for every source."""
    lines: list[tuple[str, int]]
    """The part of each sentence, and its number in the split or the file, from 1."""

    @classmethod
    def whole(
        cls, name: str, tag: str | None, sources: list[str], references: list[list[str]]
    ) -> "EvaluationSet":
        """Makes a set of all sentences of a part."""
        lines = [(name, number) for number in range(1, len(sources) + 1)]
        return cls(name, tag, sources, references, lines)

    def some(self, places: Sequence[int]) -> "EvaluationSet":
        """Returns a set of only the sentences at these positions."""
        return self._replace(
            sources=[self.sources[i] for i in places],
            references=[[whole[i] for i in places] for whole in self.references],
            lines=[self.lines[i] for i in places],
        )


class TranslatedSet(NamedTuple):
    """Holds the translations of an evaluation set, and their metrics."""

    part: EvaluationSet
    texts: list[str]
    metrics: TranslationMetrics

    def files(self) -> dict[str, list[str]]:
        """Returns the lines of each file with what was measured, by the suffix of the file's name.

        A line break inside a sentence becomes a space, as in sacrebleu's tokenizers.
        """
        numbers = [f"{part}\t{number}" for part, number in self.part.lines]
        several = len(self.part.references) > 1
        references = {
            f".reference{number if several else ''}": [*map(in_one_line, whole)]
            for number, whole in enumerate(self.part.references, 1)
        }
        sources = [*map(in_one_line, self.part.sources)]
        return {"": self.texts, ".source": sources, **references, ".lines": numbers}


def evaluation_sets(task: Task, split: str) -> list[EvaluationSet]:
    """Returns the pairs of a split, part by part."""
    return [
        EvaluationSet.whole(name, tag, [x.source for x in pairs], [[x.target for x in pairs]])
        for name, tag, pairs in task.test_pairs(split)
    ]


def subset(parts: Sequence[EvaluationSet], sentences: int) -> list[EvaluationSet]:
    """Chooses a number of sentences, evenly spread over all parts."""
    total = sum(len(part.sources) for part in parts)
    sentences, place, kept = min(sentences, total), 0, []
    for part in parts:
        span = range(place, place + len(part.sources))
        chosen = [i for i in span if i * sentences // total != (i + 1) * sentences // total]
        kept.append(part.some([i - place for i in chosen]))
        place += len(part.sources)
    return [part for part in kept if part.sources]


def translate(
    decoder: LineDecoder,
    parts: Sequence[EvaluationSet],
    progress: Progress = no_progress,
    **measuring: Any,
) -> list[TranslatedSet]:
    """Translates each part; if there are several, all of them together come first.

    `measuring` holds arguments of `compute_metrics`.
    """
    total, done, texts = sum(len(part.sources) for part in parts), 0, []
    for part in parts:
        options = dataclasses.replace(decoder.options, tag=part.tag)
        of_part = dataclasses.replace(decoder, options=options)
        requests = of_part.requests(part.sources, part.name if len(parts) > 1 else None)

        def update(part_done: int, _: int, done: int = done) -> None:
            progress(done + part_done, total)

        texts.append([*map(in_one_line, of_part.best_texts(requests, update))])
        done += len(part.sources)
    parts = [*parts]
    if len(parts) > 1:
        parts.insert(0, joined(parts))
        texts.insert(0, [text for part_texts in texts for text in part_texts])
    return [
        TranslatedSet(part, part_texts, compute_metrics(part_texts, part.references, **measuring))
        for part, part_texts in zip(parts, texts, strict=True)
    ]


def joined(parts: Sequence[EvaluationSet]) -> EvaluationSet:
    """Joins parts into one, with the first reference of each."""
    sources = [source for part in parts for source in part.sources]
    references = [[text for part in parts for text in part.references[0]]]
    lines = [line for part in parts for line in part.lines]
    return EvaluationSet("all", None, sources, references, lines)


SENTENCES_AT_ONCE = 64


class TranslationEval(Observer):
    """Translates some sentences of the validation split in every evaluation, greedily."""

    def __init__(self, run: Run, layout: Layout, mesh: Mesh, vocabs: Vocabs):
        self._run, self._mesh, self._vocabs = run, mesh, vocabs
        self._model = run.model.model(layout)
        self._parts = subset(evaluation_sets(run.task, "validation"), run.bleu_sentences)
        self._batch = whole_batch(run, layout, mesh.shape, SENTENCES_AT_ONCE)

    def evaluate(self, step: int, params: Params, progress: Progress) -> Mapping[str, float]:
        decoder = Decoder(
            self._model, prepared(self._model, params, self._mesh), self._mesh,
            Sampling(temperature=0), self._batch, **self._vocabs.target.special,
        )  # fmt: skip
        task, max_length = self._run.task, self._run.model.max_length
        of_lines = LineDecoder(decoder, task, self._vocabs, DecodeOptions(), max_length)
        quality = translate(of_lines, self._parts, progress, resamples=0, ter=False)[0].metrics
        count, bleu = quality.sentences, quality.bleu
        logger.info("Step %d: of %d validation sentences, %s.", step, count, bleu)
        return {"bleu": bleu.score, "chrf": quality.chrf.score, "bleu_sentences": count}
