"""Toy models that answer questions, and the plain definition of their answers."""

import dataclasses
import functools

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

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
from trainer.decoding.score import token_losses
from trainer.questions.prompts import Prompt, Template, make_prompts
from trainer.questions.questions import Question

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
TEMPLATE = Template.parse("{question} : {answer} ; ")
SPLIT = Layout(mesh="data:2,model:2", rules="batch:data;vocab:model;heads:model;d_ff:model")


@dataclasses.dataclass(frozen=True)
class Toy:
    """A model with weights on a mesh, and its task."""

    model: TransformerModel
    params: Params
    mesh: Mesh
    task: Task

    def prompts(self, questions: list[Question], *shots: Question) -> list[Prompt]:
        return make_prompts(TEMPLATE, shots, questions, self.task, VOCABS)


@functools.cache
def weights(spec: Transformer) -> Params:
    """Weights under which the next token depends much on the ones before."""
    params = randomised(TransformerModel(spec, WHOLE))
    rng = np.random.default_rng(3)
    return jax.tree.map(lambda w: rng.normal(0, 0.9, w.shape).astype(np.float32), params)


@functools.cache
def toy(spec: Transformer, layout: Layout = WHOLE) -> Toy:
    model, mesh = TransformerModel(spec, layout), make_mesh(layout)
    with jax.set_mesh(mesh):
        shapes = jax.eval_shape(model.init, jax.random.key(0))
        params = jax.tree.map(
            lambda w, s: jax.device_put(w, NamedSharding(mesh, s.sharding.spec)),
            weights(spec), shapes,
        )  # fmt: skip
    return Toy(model, params, mesh, PAIR_TASK if spec.has_encoder else TASK)


def losses(
    spec: Transformer, prompt: list[int], texts: list[list[int]], *, begins: bool = True
) -> np.ndarray:
    """The loss of each token of texts that follow one prompt: of a decoder, in front of it.

    Without begins, a decoder reads the prompt from its first token on.
    """
    rows = np.zeros((len(texts), LENGTH), np.int32)
    batch = {name: rows.copy() for name in ("inputs_BL", "targets_BL", "segments_BL")}
    before = [] if spec.has_encoder else prompt if begins else prompt[1:]
    for i, text in enumerate(texts):
        targets = [*before, *text]
        batch["targets_BL"][i, : len(targets)] = targets
        batch["inputs_BL"][i, 1 : len(targets)] = targets[:-1]
        if not begins:
            batch["inputs_BL"][i, : len(targets)] = [prompt[0], *targets[:-1]]
        batch["segments_BL"][i, : len(targets)] = 1
    batch["positions_BL"] = np.tile(np.arange(LENGTH, dtype=np.int32), (len(texts), 1))
    if spec.has_encoder:
        source = np.zeros((len(texts), SOURCE_LENGTH), np.int32)
        source[:, : len(prompt) + 1] = [*prompt, EOS]
        places = np.tile(np.arange(SOURCE_LENGTH, dtype=np.int32), (len(texts), 1))
        batch["inputs_BM"], batch["positions_BM"] = source, places
        batch["segments_BM"] = (places <= len(prompt)).astype(np.int32)
    whole = toy(spec)
    with jax.set_mesh(whole.mesh):
        _, placed = on_mesh(WHOLE, batch)
        losses_BL = token_losses(whole.model, whole.params, placed).loss_BL
        return np.asarray(losses_BL)[:, len(before) :]
