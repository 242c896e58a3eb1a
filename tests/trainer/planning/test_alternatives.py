"""What one other setting would change, beside plans that are made one by one."""

import dataclasses
from typing import Any

import jax
import pytest

from layouts.cost.interconnect import Topology
from layouts.cost.step_time import Timing
from layouts.layout import Layout
from layouts.mesh import mesh_sizes
from models.attention.multi_head import MultiHead
from tests.toys import SPLITTABLE, optax_promotion
from tests.trainer.planning.runs import EXPERTS, layout_named, toy_run
from trainer.checks import check_layout
from trainer.planning.alternatives import alternatives, settings, single_changes
from trainer.planning.training import StepPlan, plan_from_trace
from trainer.run import Run

RUN = toy_run(dataclasses.replace(SPLITTABLE, dropout=0.0, attention=MultiHead(), remat="full"))
LAYOUT = dataclasses.replace(layout_named("data_and_model_parallel"), mesh="data:2,model:2")
SLICE = Topology.named("v5e:2x2")
RECOMPUTATION = {"Transformer.remat", "Transformer.remat_saves", "Transformer.remat_offloads"}
LAYOUTS = {"Layout.mesh", "Layout.rules", "Layout.param_rules", "Layout.order"}


@pytest.fixture(scope="module")
def plan() -> StepPlan:
    with optax_promotion():
        return planned(RUN, LAYOUT)


@pytest.fixture(scope="module")
def rows(plan: StepPlan) -> list[dict[str, Any]]:
    with optax_promotion():
        return alternatives(plan, [RUN])


def planned(run: Run, layout: Layout) -> StepPlan:
    return plan_from_trace(run, layout, mesh_sizes(layout.mesh, SLICE.devices), SLICE)


def changed(settings: dict[str, Any]) -> tuple[Run, Layout]:
    """Returns the run and the layout with settings that a row names."""
    run, layout = RUN, LAYOUT
    for name, value in settings.items():
        owner, _, field = name.partition(".")
        if owner == "Layout":
            layout = dataclasses.replace(layout, **{field: value})
        elif owner == "Run":
            run = dataclasses.replace(run, **{field: value})
        else:
            run = dataclasses.replace(run, model=dataclasses.replace(run.model, **{field: value}))
    return run, layout


def test_each_row_is_the_plan_of_its_settings(rows: list[dict[str, Any]], plan: StepPlan) -> None:
    assert len(rows) > 10
    with optax_promotion():
        for row in rows:
            run, layout = changed(row["settings"])
            check_layout(run, layout, mesh_sizes(layout.mesh, SLICE.devices), {}, SLICE.torus)
            other = planned(run, layout)
            assert row["step_time_s"] == pytest.approx(other.step_s)
            assert row["bytes_per_device"] == pytest.approx(other.memory.needed_bytes, rel=1e-6)
            assert row["time_change"] == pytest.approx(other.step_s / plan.step_s - 1)


def test_a_row_changes_the_layout_or_the_recomputation_or_the_microbatches(
    rows: list[dict[str, Any]],
) -> None:
    changes = [set(row["settings"]) for row in rows]
    for kind in (RECOMPUTATION, LAYOUTS, {"Run.microbatches"}):
        assert any(change <= kind for change in changes)
    kinds = [RECOMPUTATION, LAYOUTS, {"Run.microbatches"}]
    assert all(change and sum(change <= kind for kind in kinds) == 1 for change in changes)
    meshes = {row["settings"].get("Layout.mesh") for row in rows}
    assert {"data:4", "data:1,model:4", "data:4,model:1"} <= meshes


def test_experts_get_their_tokens_in_other_ways() -> None:
    """A pattern of dense layers and layers with experts has one dispatch."""
    run = toy_run(dataclasses.replace(EXPERTS, layers=2))
    first, *others = single_changes(run, [run], LAYOUT, SLICE)
    assert first.run == run and settings(first)["Moe.dispatch"] == "einsum"
    (moe,) = run.model.moes
    for dispatch in ("gather", "dropless"):
        (other,) = (x for x in others if settings(x)["Moe.dispatch"] == dispatch)
        assert other.run.model.moes == (dataclasses.replace(moe, dispatch=dispatch),)
        assert settings(other) == settings(first) | {"Moe.dispatch": dispatch}


def test_recomputing_nothing_saves_time(rows: list[dict[str, Any]]) -> None:
    changes = {row["settings"].get("Transformer.remat"): row["time_change"] for row in rows}
    assert changes["none"] < 0
    times = [row["step_time_s"] for row in rows]
    assert all(row["fits"] for row in rows) and times == sorted(times)


def test_a_compiled_plan_scales_what_is_traced(rows: list[dict[str, Any]], plan: StepPlan) -> None:
    """A compiled step twice as long and three times as large has such alternatives."""
    assert plan.timing is not None
    twice = jax.tree.map(lambda seconds: 2 * seconds, dataclasses.asdict(plan.timing))
    slower = dataclasses.replace(
        plan,
        timing=Timing(**twice),
        memory=plan.memory._replace(needed_bytes=3 * plan.memory.needed_bytes),
    )
    with optax_promotion():
        scaled = alternatives(slower, [RUN])
    for row, other in zip(rows, scaled, strict=True):
        assert other["settings"] == row["settings"]
        assert other["step_time_s"] == pytest.approx(2 * row["step_time_s"])
        assert other["time_change"] == pytest.approx(row["time_change"])
        assert other["bytes_per_device"] == pytest.approx(3 * row["bytes_per_device"], abs=3)


def test_those_that_do_not_fit_come_last(rows: list[dict[str, Any]], plan: StepPlan) -> None:
    sizes = sorted(row["bytes_per_device"] for row in rows)
    limit = sizes[len(sizes) // 2]
    small = dataclasses.replace(SLICE, chip=SLICE.chip._replace(memory_bytes=limit))
    with optax_promotion():
        limited = alternatives(dataclasses.replace(plan, topology=small), [RUN])
    fits = [row["fits"] for row in limited]
    assert fits == sorted(fits, reverse=True) and {True, False} == set(fits)
    assert all(row["fits"] == (row["bytes_per_device"] <= limit) for row in limited)


def test_a_standard_layout_names_what_else_it_unsets() -> None:
    layout = dataclasses.replace(LAYOUT, slices="data:2")
    nodes = Topology.named("h100:2x2")
    with optax_promotion():
        plan = plan_from_trace(RUN, layout, mesh_sizes(layout.mesh, nodes.devices), nodes)
        rows = alternatives(plan, [RUN])
    others = [row["settings"] for row in rows if "Layout.rules" in row["settings"]]
    assert others and all(settings["Layout.slices"] is None for settings in others)
