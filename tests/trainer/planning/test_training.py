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
from trainer.planning.training import compiled, plan, planned, traced


@pytest.mark.parametrize("name", LAYOUTS)
def test_trace_and_compiler_count_the_same_products(name: str) -> None:
    assert compiled_toy(name).flops == pytest.approx(traced_toy(name).cost.flops, rel=0.02)


@pytest.mark.parametrize("name", LAYOUTS)
def test_trace_and_compiler_send_the_same_along_each_mesh_axis(name: str) -> None:
    step = traced_toy(name)
    found = by_mesh_axis(compiled_toy(name).collectives, step.sizes)
    wanted = by_mesh_axis(step.cost.collectives, step.sizes)
    assert found == pytest.approx(wanted, rel=0.1)


def test_every_exchange_has_a_line_that_causes_it() -> None:
    found = compiled_toy("data_and_model_parallel").collectives
    assert all(own.source.startswith(("models/", "trainer/")) for own in found)
    feed_forward = {own.source for own in found if "feed_forward.py" in own.source}
    assert any("bf,fd->bd" in source and "(backward)" not in source for source in feed_forward)
    assert any("bd,df->bf" in source and "(backward)" in source for source in feed_forward)


def test_memory_is_told_by_cause() -> None:
    found = plan(traced_toy("fsdp"), None, compiled_toy("fsdp"))
    causes = found.counted.bytes_by_cause
    params = sum(weight.bytes for weight in found.weights)
    assert causes["parameters"] == params // 8
    assert causes["gradients"] == pytest.approx(causes["parameters"], rel=0.05)
    assert sum(causes.values()) == found.counted.needed_bytes
    assert found.fits is None and found.step_s is None  # nobody said what the devices are


def test_a_plan_of_a_slice_needs_no_compiler() -> None:
    slice = Slice.named("v3:2x2")
    found = planned(
        toy_run(), layout_named("data_and_model_parallel"), {"data": 4, "model": 2}, slice
    )
    assert found.fits and found.counted.compile_s is None
    assert found.timing is not None and found.step_s is not None
    assert found.timing.products_s > 0
    assert set(found.timing.traffic_s) <= {"data", "model", "data,model"}
    assert found.utilisation == pytest.approx(
        found.model_flops / (found.step_s * 8 * slice.chip.peak_flops)
    )
    # The model's own FLOPs, of which the loss makes its gradients on the way forward.
    assert found.executed_flops == pytest.approx(found.model_flops, rel=0.02)


def test_padding_costs_what_a_model_of_the_padded_size_costs() -> None:
    """But the model asks for no more than it has: 6 heads held as 8, 66 tokens as 68."""
    layout = Layout(mesh="data:2,model:4", rules="batch:data;heads:model+;vocab:model+")
    padded, larger = (
        planned(
            toy_run(dataclasses.replace(DENSE, layers=1, heads=heads, vocab=vocab)),
            layout,
            {"data": 2, "model": 4},
            None,
        )
        for heads, vocab in ((6, 66), (8, 68))
    )
    assert padded.executed_flops == larger.executed_flops
    assert (
        padded.counted.bytes_by_cause["parameters"] == larger.counted.bytes_by_cause["parameters"]
    )
    assert padded.model_flops < larger.model_flops
    head, token = 4 * DENSE.d_model * DENSE.d_kv, DENSE.d_model
    assert larger.parameters - padded.parameters == 2 * head + 2 * token


@pytest.mark.skipif(not has_tpu_compiler(), reason="libtpu is not installed: pip install libtpu")
def test_the_step_compiles_for_tpus_that_are_not_there() -> None:
    slice, sizes = Slice.named("v3:2x2"), {"data": 4, "model": 2}
    layout = layout_named("data_and_model_parallel")
    with optax_promotion():
        step = traced(toy_run(), layout, topology_mesh(slice.name, sizes))
        counted = compiled(step)
    assert counted.flops == pytest.approx(step.cost.flops, rel=0.02)
    found = plan(step, slice, counted)
    assert found.counted.compiled_for == "TPU" and found.fits
    assert found.timing is not None
    assert found.timing.products_s > 0 and found.timing.other_s > 0
    assert math.isclose(sum(found.timing.parts.values()), found.step_s or 0)
