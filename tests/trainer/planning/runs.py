"""Plans and compiles a toy run under shipped layouts, each once."""

import dataclasses
import functools

from configs.load import load
from data.sources.text import TextFiles
from data.task import Task
from data.vocab import SentencePiece
from layouts.layout import Layout
from layouts.mesh import make_mesh
from models.architectures import Transformer
from models.spec import Moe
from tests.toys import ROOT, optax_promotion
from trainer.planning.counts import Compilation, compile_for
from trainer.planning.training import StepCounts, TracedStep, count_step, trace_step
from trainer.run import Run

# Deep, as compilers have ways of their own to look up embeddings, once a step.
DENSE = Transformer(vocab=64, layers=48, d_model=32, d_ff=80, heads=8, d_kv=12, length=24)
EXPERTS = dataclasses.replace(
    DENSE, pattern=("dense", "moe"), moe=Moe(experts=16, dispatch="einsum")
)
TASK = Task(name="toy", source=TextFiles(train="toy.txt"), vocab=SentencePiece(size=64), length=24)
LAYOUTS = sorted(path.stem for path in (ROOT / "layouts").glob("*.gin"))


def toy_run(model: Transformer = DENSE) -> Run:
    return Run(model=model, task=TASK, steps=10, batch_sequences=16)


def layout_named(name: str) -> Layout:
    return load([str(ROOT / f"layouts/{name}.gin")]).make(Layout)


@functools.cache
def traced_toy(name: str) -> TracedStep:
    """Traces the toy's step on eight devices; with experts where the layout has rules for them."""
    layout = layout_named(name)
    run = toy_run(EXPERTS if "expert" in name else DENSE)
    with optax_promotion():
        return trace_step(run, layout, make_mesh(layout))


@functools.cache
def compilation_of_toy(name: str) -> Compilation:
    step = traced_toy(name)
    with optax_promotion():
        return compile_for(step.program, step.mesh)


@functools.cache
def compiled_toy(name: str) -> StepCounts:
    return count_step(traced_toy(name), compilation_of_toy(name))
