"""Which layout is the fastest, and in which order of the devices."""

import dataclasses
import functools

import pytest

from layouts.cost.calibration import HostRates
from layouts.cost.interconnect import Topology
from layouts.layout import Layout
from tests.toys import optax_promotion
from tests.trainer.planning.runs import DENSE, toy_run
from trainer.planning.search import (
    DATA_PARALLEL,
    FSDP,
    FSDP_AND_MODEL,
    legal_layouts,
    one_line,
    plan_layouts,
    rank_layouts,
    shortlist,
    with_best_order,
)
from trainer.planning.training import StepPlan, plan_from_trace, with_device_order

RUN = toy_run(dataclasses.replace(DENSE, layers=2))
SLICE = Topology.named("v3:8x8")
MESH = {"data": 16, "model": 8}
SPLIT = Layout(mesh="data:16,model:8", rules="batch:data;heads:model;d_ff:model;vocab:model")
# Not among the candidates: the vocabulary stays whole.
CONFIGURED = Layout(mesh="data:4,model:2", rules="batch:data;heads:model;d_ff:model")
HOST = HostRates(8, flops_per_s=1.0, bytes_per_s=1e20, elements_per_s=1e20, collective_s=0.0,
            received_per_s=1e20)  # fmt: skip


def test_the_fastest_order_of_devices_is_found_without_another_trace() -> None:
    with optax_promotion():
        plan = plan_from_trace(RUN, SPLIT, MESH, SLICE)
        best = with_best_order(plan)
        again = plan_from_trace(RUN, best.layout, MESH, SLICE)
    assert best.layout.order is not None
    assert best.step_s < plan.step_s
    assert with_device_order(best, None).timing == plan.timing
    assert again.timing == best.timing


def test_microbatches_must_divide_as_well() -> None:
    layouts = [Layout(mesh="data:8"), Layout(mesh="data:4,model:2")]
    assert legal_layouts([RUN], 8, layouts) == [layouts[1], layouts[0]]
    few = dataclasses.replace(RUN, microbatches=4)
    assert legal_layouts([few], 8, layouts) == [layouts[1]]


@pytest.mark.parametrize("order", ["data:y;data:core;model:x", None])
def test_a_plan_is_of_the_order_that_the_layout_says(order: str | None) -> None:
    with optax_promotion():
        plan = plan_from_trace(RUN, dataclasses.replace(SPLIT, order=order), MESH, SLICE)
    assert plan.timing == with_device_order(plan, order).timing
    other = None if order else "data:y;data:core;model:x"
    assert plan.timing != with_device_order(plan, other).timing


def test_another_order_keeps_what_it_does_not_change() -> None:
    """Values that wait in the memory of the host, and the mesh axis over several slices."""
    model = dataclasses.replace(RUN.model, remat="full", remat_offloads=("layer_input",))
    sliced = Layout(mesh="data:4,model:4", rules=SPLIT.rules, slices="model:2")
    mesh, slices = {"data": 4, "model": 4}, Topology.named("2xv5e:2x4")
    with optax_promotion():
        run, chips = dataclasses.replace(RUN, model=model), Topology.named("v5e:8x16")
        offloaded = plan_from_trace(run, SPLIT, MESH, chips)
        plans = (offloaded, plan_from_trace(RUN, sliced, mesh, slices))
    assert offloaded.timing is not None and offloaded.timing.memory_s > 0
    for plan in plans:
        assert with_device_order(plan, None).timing == plan.timing


@functools.cache
def ranked_layouts() -> list[StepPlan]:
    with optax_promotion():
        return rank_layouts([RUN], Topology.named("v5e:2x4"), [CONFIGURED])


def test_the_layout_of_the_files_is_ranked() -> None:
    assert CONFIGURED.rules in {plan.layout.rules for plan in ranked_layouts()}


def test_standard_layouts_and_that_of_the_files_are_compiled_too() -> None:
    ranking = ranked_layouts()
    first = shortlist(ranking, [CONFIGURED], 3)
    layouts = [(plan.layout.rules, plan.layout.param_rules) for plan in first]
    assert first[:3] == ranking[:3]
    assert {DATA_PARALLEL, FSDP, FSDP_AND_MODEL, (CONFIGURED.rules, CONFIGURED.param_rules)} <= set(
        layouts
    )
    assert len({one_line(plan.layout) for plan in first}) == len(first) <= 3 + 5


def test_what_cannot_fit_is_not_compiled_as_a_standard() -> None:
    ranking = ranked_layouts()
    [large] = [p for p in ranking if (p.layout.rules, p.layout.param_rules) == DATA_PARALLEL]
    memory = large.memory
    causes = {**memory.bytes_by_cause, "parameters": 21 * 2**30}
    memory = memory._replace(bytes_by_cause=causes, needed_bytes=sum(causes.values()))
    too_large = dataclasses.replace(large, memory=memory)
    ranking = [*(plan for plan in ranking if plan is not large), too_large]
    assert too_large.layout not in {plan.layout for plan in shortlist(ranking, [], 3)}


def test_a_layout_that_cannot_be_traced_is_skipped() -> None:
    """Heads that do not divide stand for whatever the lint overlooks."""
    broken = Layout(mesh="data:16,model:8", rules="batch:data;d_kv:model")
    with optax_promotion():
        planned = [*plan_layouts(RUN, [broken, SPLIT], SLICE)]
    assert [plan.layout.rules for plan in planned] == [SPLIT.rules]
