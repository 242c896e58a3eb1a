"""What a run says of its step before the first: from the program that then runs."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from layouts.cost.collectives import by_mesh_axis
from layouts.cost.interconnect import Topology
from layouts.mesh import make_mesh
from models.transformer import Transformer
from tests.trainer.planning.runs import layout_named, toy_run
from trainer.loop import TrainJob, compile_train_step
from trainer.observers import CompiledStep
from trainer.planning.report import compare, predict, summary
from trainer.planning.training import StepCounts, StepPlan, TracedStep, plan_step, trace_step
from trainer.step import State, init_state, train_step_spec

SMALL = Transformer(vocab=64, layers=2, d_model=16, d_ff=40, heads=8, d_kv=6, length=24)


@functools.cache
def ready() -> tuple[tuple[StepPlan, str], CompiledStep, TracedStep, State]:
    run, layout = toy_run(SMALL), layout_named("data_and_model_parallel")
    mesh = make_mesh(layout)
    state = init_state(train_step_spec(run, layout), mesh)
    compiled = compile_train_step(TrainJob(run, layout, mesh, {}, Path()), state)
    return predict(compiled), compiled, trace_step(run, layout, mesh), state


def test_the_program_that_was_read_is_the_one_that_runs() -> None:
    _, compiled, _, state = ready()
    with jax.set_mesh(compiled.mesh):
        batch = {
            name: jax.device_put(np.ones(x.shape, np.int32), x.sharding)
            for name, x in compiled.batch.items()
        }
        new, metrics = compiled.executable(state, batch)
    assert int(new["step"]) == 1 and np.isfinite(float(metrics["loss"]))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state["params"]))  # not copied


def test_memory_products_and_traffic_are_predicted() -> None:
    (cost, text), _, step, _ = ready()
    assert cost.memory.compiled_for == "CPU"
    assert cost.executed_flops == pytest.approx(8 * step.cost.flops, rel=0.02)
    sent = by_mesh_axis(cost.work.collectives, step.sizes)
    assert sent == pytest.approx(by_mesh_axis(step.cost.collectives, step.sizes), rel=0.2)
    assert text.startswith("Step: ") and "optimizer state" in text
    assert f"{cost.executed_flops / 1e6:.3g} MFLOPs" in text and "from its trace" not in text


def test_a_time_is_predicted_on_tpus_only() -> None:
    """A CPU has no published rates; measured ones were off by a factor of two."""
    (plan, text), _, step, _ = ready()
    assert plan.step_s is None and "\n" not in text
    counts = StepCounts(plan.work, plan.memory)
    on_tpus = plan_step(step, Topology.named("v3:2x2"), counts)
    assert f"Predicted step time: {on_tpus.step_s:.3g} s" in summary(on_tpus)


def test_measured_and_predicted_times_are_compared() -> None:
    assert compare(0.5, None) == "Step time: 0.5 s."
    assert compare(0.6, 0.5) == "Step time: 0.6 s measured, 0.5 s predicted (+20%)."


def test_a_text_of_another_compiler_stops_no_training() -> None:
    _, compiled, step, _ = ready()

    class Garbled:
        """A program whose text calls what is not in it."""

        def memory_analysis(self) -> Any:
            return jax.jit(lambda x: x).lower(np.ones(1)).compile().memory_analysis()

        def as_text(self) -> str:
            return "ENTRY main (a: f32[]) -> f32[] {\n  ROOT %b = f32[] call(%a), to_apply=%c\n}\n"

    plan, text = predict(dataclasses.replace(compiled, executable=Garbled()))
    assert plan.work.flops == step.cost.flops and "from its trace" in text
