"""What a run says of its step before the first: from the program that then runs."""

import functools
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from layouts.cost.collectives import by_mesh_axis
from layouts.mesh import make_mesh
from models.transformer import Transformer
from tests.trainer.planning.runs import layout_named, toy_run
from trainer.planning.prediction import Foreseen, counted_in, foresee, held_against, prediction
from trainer.planning.training import StepCounts, TracedStep, plan_step, trace_step
from trainer.run import program_of
from trainer.step import State, init_state

SMALL = Transformer(vocab=64, layers=2, d_model=16, d_ff=40, heads=8, d_kv=6, length=24)


@functools.cache
def ready() -> tuple[Foreseen, TracedStep, Mesh, State]:
    run, layout = toy_run(SMALL), layout_named("data_and_model_parallel")
    mesh = make_mesh(layout)
    state = init_state(program_of(run, layout), mesh)
    step = trace_step(run, layout, mesh, state)
    return foresee(step), step, mesh, state


def test_the_program_that_was_read_is_the_one_that_runs() -> None:
    own, step, mesh, state = ready()
    with jax.set_mesh(mesh):
        batch = {
            name: jax.device_put(np.ones(x.shape, np.int32), x.sharding)
            for name, x in step.batch.items()
        }
        new, metrics = own.step(state, batch)
    assert int(new["step"]) == 1 and np.isfinite(float(metrics["loss"]))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state["params"]))  # not copied


def test_memory_products_and_traffic_are_told() -> None:
    own, step, _, _ = ready()
    found = own.plan
    assert found.memory.compiled_for == "CPU"
    assert found.executed_flops == pytest.approx(8 * step.cost.flops, rel=0.02)
    sent = by_mesh_axis(found.work.collectives, step.sizes)
    assert sent == pytest.approx(by_mesh_axis(step.cost.collectives, step.sizes), rel=0.2)
    assert found.timing is not None and found.timing.products_s > 0 and found.timing.other_s > 0
    first, second = own.told.split("\n")
    assert first.startswith("The step: ") and "optimizer state" in first
    assert f"{found.executed_flops / 1e6:.3g} MFLOPs" in first and "By its trace" not in first
    assert f"{found.step_s:.3g} s a step" in second and "GFLOP/s" in second


def test_without_rates_nothing_is_predicted() -> None:
    own, step, _, _ = ready()
    found = plan_step(step, None, StepCounts(own.plan.work, own.plan.memory))
    assert prediction(found, "no rates of it are known").startswith(
        "No time is predicted: no rates"
    )
    assert held_against(0.5, found.step_s) == "0.5 s a step measured; no prediction."
    assert held_against(0.6, 0.5) == "0.6 s a step measured, 0.5 s predicted (+20%)."


def test_a_text_of_another_compiler_stops_no_training() -> None:
    _, step, _, _ = ready()

    class Garbled:
        """A program whose text calls what is not in it."""

        def memory_analysis(self) -> Any:
            return jax.jit(lambda x: x).lower(np.ones(1)).compile().memory_analysis()

        def as_text(self) -> str:
            return "ENTRY main (a: f32[]) -> f32[] {\n  ROOT %b = f32[] call(%a), to_apply=%c\n}\n"

    counted, told = counted_in(step, Garbled(), 0.0)
    assert counted.work.flops == step.cost.flops and "By its trace" in told
