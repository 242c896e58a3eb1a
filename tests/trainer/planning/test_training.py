"""Plans: the trace and the compiled program agree, and say what a run costs."""

import dataclasses
import math

import pytest

from layouts.cost.collectives import by_mesh_axis
from layouts.cost.interconnect import Slice
from layouts.layout import Layout
from layouts.mesh import has_tpu_compiler, topology_mesh
from tests.toys import optax_promotion
from tests.trainer.planning.runs import (
    DENSE,
    LAYOUTS,
    compiled_toy,
    layout_named,
    toy_run,
    traced_toy,
)
from trainer.planning.training import compile_step, plan_from_trace, plan_step, trace_step


@pytest.mark.parametrize("name", LAYOUTS)
def test_trace_and_compiler_count_the_same_products(name: str) -> None:
    assert compiled_toy(name).work.flops == pytest.approx(traced_toy(name).cost.flops, rel=0.02)


@pytest.mark.parametrize("name", LAYOUTS)
def test_trace_and_compiler_send_the_same_along_each_mesh_axis(name: str) -> None:
    step = traced_toy(name)
    found = by_mesh_axis(compiled_toy(name).work.collectives, step.sizes)
    wanted = by_mesh_axis(step.cost.collectives, step.sizes)
    assert found == pytest.approx(wanted, rel=0.1)


def test_every_exchange_has_a_line_that_causes_it() -> None:
    found = compiled_toy("data_and_model_parallel").work.collectives
    assert all(own.source.startswith(("models/", "trainer/")) for own in found)
    feed_forward = {own.source for own in found if "feed_forward.py" in own.source}
    assert any("bf,fd->bd" in source and "(backward)" not in source for source in feed_forward)
    assert any("bd,df->bf" in source and "(backward)" in source for source in feed_forward)


def test_memory_is_told_by_cause() -> None:
    plan = plan_step(traced_toy("fsdp"), None, compiled_toy("fsdp"))
    causes = plan.memory.bytes_by_cause
    params = sum(weight.bytes for weight in plan.weights)
    assert causes["parameters"] == params // 8
    assert causes["gradients"] == pytest.approx(causes["parameters"], rel=0.05)
    assert sum(causes.values()) == plan.memory.needed_bytes
    assert plan.fits is None and plan.step_s is None  # nobody said what the devices are


def test_a_plan_of_a_slice_needs_no_compiler() -> None:
    slice = Slice.named("v3:2x2")
    plan = plan_from_trace(
        toy_run(), layout_named("data_and_model_parallel"), {"data": 4, "model": 2}, slice
    )
    assert plan.fits and plan.memory.compile_s is None
    assert plan.timing is not None and plan.step_s is not None
    assert plan.timing.products_s > 0
    assert set(plan.timing.traffic_s) <= {"data", "model", "data,model"}
    assert plan.utilisation == pytest.approx(
        plan.model_flops / (plan.step_s * 8 * slice.chip.peak_flops)
    )
    # The model's own FLOPs, of which the loss makes its gradients on the way forward.
    assert plan.executed_flops == pytest.approx(plan.model_flops, rel=0.02)


def test_padding_costs_what_a_model_of_the_padded_size_costs() -> None:
    """But the model asks for no more than it has: 6 heads held as 8, 66 tokens as 68."""
    layout = Layout(mesh="data:2,model:4", rules="batch:data;heads:model+;vocab:model+")
    padded, larger = (
        plan_from_trace(
            toy_run(dataclasses.replace(DENSE, layers=1, heads=heads, vocab=vocab)),
            layout,
            {"data": 2, "model": 4},
            None,
        )
        for heads, vocab in ((6, 66), (8, 68))
    )
    assert padded.executed_flops == larger.executed_flops
    assert padded.memory.bytes_by_cause["parameters"] == larger.memory.bytes_by_cause["parameters"]
    assert padded.model_flops < larger.model_flops
    head, token = 4 * DENSE.d_model * DENSE.d_kv, DENSE.d_model
    assert larger.parameters - padded.parameters == 2 * head + 2 * token


@pytest.mark.skipif(not has_tpu_compiler(), reason="libtpu is not installed: pip install libtpu")
def test_the_step_compiles_for_tpus_that_are_not_there() -> None:
    slice, sizes = Slice.named("v3:2x2"), {"data": 4, "model": 2}
    layout = layout_named("data_and_model_parallel")
    with optax_promotion():
        step = trace_step(toy_run(), layout, topology_mesh(slice.name, sizes))
        counts = compile_step(step)
    assert counts.work.flops == pytest.approx(step.cost.flops, rel=0.02)
    plan = plan_step(step, slice, counts)
    assert plan.memory.compiled_for == "TPU" and plan.fits
    assert plan.timing is not None
    assert plan.timing.products_s > 0 and plan.timing.other_s > 0
    assert math.isclose(sum(plan.timing.parts.values()), plan.step_s or 0)
