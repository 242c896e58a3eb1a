"""Toy models that read made-up words, and the plain definition of what they say."""

import dataclasses
import functools

import jax
import numpy as np
from jax.sharding import NamedSharding

from data.sources.pair_kinds import ParallelFiles
from data.sources.text import TextFiles
from data.task import Task
from data.tasks.translation import Translation
from data.tokenizers.sentence_piece import SentencePiece
from data.vocab import EOS, make
from data.vocabs import Vocabs
from layouts.layout import Layout
from layouts.mesh import make_mesh
from models.api import Params
from models.positions.relative import Relative
from models.transformer import Transformer, TransformerModel
from tests.models.test_transformer import randomised
from tests.toys import WHOLE, on_mesh
from trainer.checkpoints.restore import TrainedModel
from trainer.decoding.score import token_losses
from trainer.run import Run

WORDS = ("kara", "lost", "mitu", "nevo", "lora", "miru", "neka", "tura", ":", ";")
SPEC = SentencePiece(size=310)
VOCAB = make(SPEC, iter([" ".join(WORDS), " ".join(WORDS[::-1])] * 20))
VOCABS = Vocabs(VOCAB, VOCAB)
LENGTH, SOURCE_LENGTH = 26, 22
TASK = Task(name="toy", source=TextFiles(train="text.txt"), vocab=SPEC, length=LENGTH)
PAIR_TASK = Translation(
    name="toy", vocab=SPEC, length=LENGTH, source_length=SOURCE_LENGTH,
    source=ParallelFiles(train_source=("a",), train_target=("b",)),
)  # fmt: skip
DECODER = Transformer(
    vocab=312, layers=1, d_model=12, d_ff=16, heads=2, kv_heads=2, d_kv=4, length=64, scan=False
)
PAIR = dataclasses.replace(DECODER, encoder_layers=1, positions=Relative())
SPLIT = Layout(mesh="data:2,model:2", rules="batch:data;vocab:model;heads:model;d_ff:model")


@functools.cache
def weights(spec: Transformer) -> Params:
    """Weights under which the next token depends much on the ones before."""
    params = randomised(TransformerModel(spec, WHOLE))
    rng = np.random.default_rng(3)
    return jax.tree.map(lambda w: rng.normal(0, 0.9, w.shape).astype(np.float32), params)


@functools.cache
def toy(spec: Transformer, layout: Layout = WHOLE) -> TrainedModel:
    """A model with weights under a layout, and its task."""
    model, mesh = TransformerModel(spec, layout), make_mesh(layout)
    with jax.set_mesh(mesh):
        shapes = jax.eval_shape(model.init, jax.random.key(0))
        params = jax.tree.map(
            lambda w, s: jax.device_put(w, NamedSharding(mesh, s.sharding.spec)),
            weights(spec), shapes,
        )  # fmt: skip
    task = PAIR_TASK if spec.has_encoder else TASK
    run = Run(model=spec, task=task, steps=1, batch_sequences=4)
    return TrainedModel(model, params, run, VOCABS, mesh, 1)


def losses(spec: Transformer, context: list[int], texts: list[list[int]]) -> np.ndarray:
    """The loss of each token of texts that follow one context, which an encoder reads."""
    rows = np.zeros((len(texts), LENGTH), np.int32)
    batch = {name: rows.copy() for name in ("inputs_BL", "targets_BL", "segments_BL")}
    before = [] if spec.has_encoder else context
    for i, text in enumerate(texts):
        targets = [*before, *text]
        batch["targets_BL"][i, : len(targets)] = targets
        batch["inputs_BL"][i, 1 : len(targets)] = targets[:-1]
        batch["segments_BL"][i, : len(targets)] = 1
    batch["positions_BL"] = np.tile(np.arange(LENGTH, dtype=np.int32), (len(texts), 1))
    if spec.has_encoder:
        source = np.zeros((len(texts), SOURCE_LENGTH), np.int32)
        source[:, : len(context) + 1] = [*context, EOS]
        places = np.tile(np.arange(SOURCE_LENGTH, dtype=np.int32), (len(texts), 1))
        batch["inputs_BM"], batch["positions_BM"] = source, places
        batch["segments_BM"] = (places <= len(context)).astype(np.int32)
    whole = toy(spec)
    with jax.set_mesh(whole.mesh):
        _, placed = on_mesh(WHOLE, batch)
        losses_BL = token_losses(whole.model, whole.params, placed).loss_BL
        return np.asarray(losses_BL)[:, len(before) :]
