"""Measures BLEU during training, on translations of the validation split."""

import logging
from collections.abc import Mapping

from jax.sharding import Mesh

from data.vocabs import Vocabs
from layouts.layout import Layout
from layouts.mesh import batch_shards
from models.api import Params
from models.decoding.sampling import Sampling
from trainer.decoding.decoder import Decoder, prepared
from trainer.decoding.requests import DecodeOptions
from trainer.evaluate import Progress
from trainer.observers import Observer
from trainer.run import Run
from trainer.translation.evaluate import evaluation_sets, subset, translate

logger = logging.getLogger(__name__)
SENTENCES_AT_ONCE = 64


class TranslationEval(Observer):
    """Translates some sentences of the validation split in every evaluation, greedily."""

    def __init__(self, run: Run, layout: Layout, mesh: Mesh, vocabs: Vocabs):
        self._run, self._mesh, self._vocabs = run, mesh, vocabs
        self._model = run.model.model(layout)
        self._parts = subset(evaluation_sets(run.task, "validation"), run.bleu_sentences)
        shards = batch_shards(layout, mesh.shape)
        self._batch = -(-SENTENCES_AT_ONCE // shards) * shards

    def evaluate(self, step: int, params: Params, progress: Progress) -> Mapping[str, float]:
        vocab = self._vocabs.target
        decoder = Decoder(
            self._model, prepared(self._model, params, self._mesh), self._mesh,
            Sampling(temperature=0), self._batch,
            vocab.begin_id, vocab.stop_ids,
        )  # fmt: skip
        translated = translate(
            decoder, self._parts, self._run.task, self._vocabs, DecodeOptions(),
            self._run.model.max_length, resamples=0, ter=False,
            progress=progress,
        )  # fmt: skip
        quality = translated[0].metrics
        logger.info(
            "Step %d: of %d validation sentences, %s.", step, quality.sentences, quality.bleu
        )
        return {
            "bleu": quality.bleu.score,
            "chrf": quality.chrf.score,
            "bleu_sentences": quality.sentences,
        }


def bleu_observers(
    run: Run, layout: Layout, mesh: Mesh, vocabs: Vocabs
) -> tuple[TranslationEval, ...]:
    """Returns the observer that measures BLEU if the run has bleu_sentences."""
    if not run.bleu_sentences or not run.task.has_source:
        return ()
    return (TranslationEval(run, layout, mesh, vocabs),)
