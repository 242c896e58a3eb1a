"""Plans and compiles a toy run under shipped layouts, each once."""

import dataclasses
import functools

from configs.load import load
from data.sources.pair_kinds import ParallelFiles
from data.sources.text import TextFiles
from data.task import Task
from data.tasks.translation import Translation
from data.tokenizers.sentence_piece import SentencePiece
from layouts.layout import Layout
from layouts.mesh import make_mesh
from models.feed_forward.moe.layer import Moe
from models.parts import Block
from models.transformer import Transformer
from tests.toys import ROOT, optax_promotion
from trainer.planning.counts import Compilation, compile_for
from trainer.planning.training import StepCounts, TracedStep, count_step, trace_step
from trainer.run import Run

# Deep, as compilers have ways of their own to look up embeddings, once a step.
DENSE = Transformer(vocab=64, layers=48, d_model=32, d_ff=80, heads=8, d_kv=12, length=24)
EXPERTS = dataclasses.replace(
    DENSE, pattern=(Block(), Block(feed_forward=Moe(experts=16, dispatch="einsum")))
)
TASK = Task(name="toy", source=TextFiles(train="toy.txt"), vocab=SentencePiece(size=64), length=24)
ENCODER_DECODER = dataclasses.replace(DENSE, layers=4, encoder_layers=4)
PAIR_TASK = Translation(
    name="toy", vocab=SentencePiece(size=64), length=24, source_length=12,
    source=ParallelFiles(train_source=("a",), train_target=("b",)),
)  # fmt: skip
LAYOUTS = sorted(path.stem for path in (ROOT / "layouts").glob("*.gin"))


def toy_run(model: Transformer = DENSE) -> Run:
    return Run(model=model, task=TASK, steps=10, batch_sequences=16)


RUNS = {
    "dense": toy_run(),
    "encoder-decoder": dataclasses.replace(toy_run(ENCODER_DECODER), task=PAIR_TASK),
    "experts": toy_run(EXPERTS),
    "microbatches": dataclasses.replace(toy_run(), batch_sequences=32, microbatches=4),
}


def layout_named(name: str) -> Layout:
    return load([str(ROOT / f"layouts/{name}.gin")]).make(Layout)


def suited(name: str) -> str:
    """Returns the kind of model that a layout has rules for."""
    return "experts" if "expert" in name else "dense"


@functools.cache
def traced(kind: str, name: str) -> TracedStep:
    """Traces the step of a kind of model on eight devices under a shipped layout."""
    layout = layout_named(name)
    with optax_promotion():
        return trace_step(RUNS[kind], layout, make_mesh(layout))


@functools.cache
def compilation(kind: str, name: str) -> Compilation:
    step = traced(kind, name)
    with optax_promotion():
        return compile_for(step.traced, step.mesh)


@functools.cache
def compiled(kind: str, name: str) -> StepCounts:
    return count_step(traced(kind, name), compilation(kind, name))


def traced_toy(name: str) -> TracedStep:
    return traced(suited(name), name)


def compilation_of_toy(name: str) -> Compilation:
    return compilation(suited(name), name)


def compiled_toy(name: str) -> StepCounts:
    return compiled(suited(name), name)
