"""Which layout is the fastest, and in which order of the devices."""

import dataclasses
import functools
import logging

import pytest

from layouts.candidates import DATA_PARALLEL, FSDP, FSDP_AND_MODEL
from layouts.cost.calibration import HostRates
from layouts.cost.interconnect import Topology
from layouts.layout import Layout
from layouts.lint.warnings import executed_flops
from tests.toys import optax_promotion
from tests.trainer.planning.runs import DENSE, toy_run
from trainer.checks import record_loss
from trainer.planning.child import CompilerAborted
from trainer.planning.counts import Compilation
from trainer.planning.search import (
    RankedLayout,
    benchmark_layouts,
    compile_layouts,
    fewest_products_first,
    legal_layouts,
    median_s,
    plan_layouts,
    rank_layouts,
    shortlist,
    slowdown,
    with_best_order,
    without,
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
        best = with_best_order(RankedLayout(SPLIT, plan))
        again = plan_from_trace(RUN, best.layout, MESH, SLICE)
    assert best.layout.order is not None
    assert best.step_s < RankedLayout(SPLIT, plan).step_s
    assert with_device_order(best.plan, None).timing == plan.timing
    assert again.timing == best.plan.timing


def test_products_alone_bound_a_step_from_below() -> None:
    """What every device computes alike counts as often."""
    record = record_loss(RUN)
    whole = Layout(mesh="data:8", rules="")
    half = Layout(mesh="data:4,model:2", rules="batch:data")
    assert executed_flops(whole, {"data": 8}, record) == record.flops
    assert executed_flops(half, {"data": 4, "model": 2}, record) == record.flops / 4
    assert [layout for _, layout in fewest_products_first(RUN, [whole, half], HOST)] == [
        half,
        whole,
    ]


def test_what_only_multiplies_for_longer_than_the_best_step_is_not_traced(
    caplog: pytest.LogCaptureFixture,
) -> None:
    layouts = [Layout(mesh="data:8"), Layout(mesh="data:8", rules="")]
    logger = logging.getLogger("trainer.planning.search")
    caplog.set_level(logging.INFO, logger.name)
    logger.addHandler(caplog.handler)  # commands keep records from the root logger
    with optax_promotion():
        ranking = plan_layouts(RUN, layouts, HOST, [])
    logger.removeHandler(caplog.handler)
    assert [ranked.layout for ranked in ranking] == layouts[:1]
    assert caplog.messages[-1].startswith("Skipped 1: their products alone take")


def test_the_best_few_take_turns_on_the_devices_at_hand() -> None:
    """Their times are then those of real steps, not of the trace."""
    run, one = toy_run(dataclasses.replace(DENSE, layers=1)), HOST._replace(devices=1)
    with optax_promotion():
        ranking = plan_layouts(run, [Layout(mesh="data:1", rules="")], one, [])
        again = benchmark_layouts(run, ranking)
    assert [ranked.layout for ranked in again] == [ranked.layout for ranked in ranking]
    assert (ranking[0].basis, again[0].basis) == ("trace", "steps")
    assert 0 < again[0].step_s < 60 < ranking[0].step_s


def test_a_ratio_is_to_the_best_of_the_same_round() -> None:
    rounds = [{"a": 1.0, "b": 2.0}, {"a": 8.0, "b": 4.0}, {"a": 3.0, "b": 9.0}]
    assert (slowdown(rounds, "a"), slowdown(rounds, "b")) == (1.0, 2.0)
    assert median_s(rounds, "a") == 3.0


def test_microbatches_must_divide_as_well() -> None:
    layouts = [Layout(mesh="data:8"), Layout(mesh="data:4,model:2")]
    assert legal_layouts(RUN, 8, layouts) == [layouts[1], layouts[0]]
    few = dataclasses.replace(RUN, microbatches=4)
    assert legal_layouts(few, 8, layouts) == [layouts[1]]


@pytest.mark.parametrize("order", ["data:y;data:core;model:x", None])
def test_a_plan_is_of_the_order_that_the_layout_says(order: str | None) -> None:
    with optax_promotion():
        plan = plan_from_trace(RUN, dataclasses.replace(SPLIT, order=order), MESH, SLICE)
    assert plan.timing == with_device_order(plan, order).timing
    other = None if order else "data:y;data:core;model:x"
    assert plan.timing != with_device_order(plan, other).timing


@functools.cache
def ranked_layouts() -> list[RankedLayout]:
    with optax_promotion():
        return rank_layouts(RUN, Topology.named("v5e:2x4"), [CONFIGURED])


def test_the_layout_of_the_files_is_ranked() -> None:
    assert CONFIGURED.rules in {ranked.layout.rules for ranked in ranked_layouts()}


def test_standard_layouts_and_that_of_the_files_are_compiled_too() -> None:
    ranking = ranked_layouts()
    first = shortlist(ranking, [CONFIGURED], 3)
    layouts = [(ranked.layout.rules, ranked.layout.param_rules) for ranked in first]
    assert first[:3] == ranking[:3]
    assert {DATA_PARALLEL, FSDP, FSDP_AND_MODEL, (CONFIGURED.rules, CONFIGURED.param_rules)} <= set(
        layouts
    )
    assert len({ranked.name for ranked in first}) == len(first) <= 3 + 5
    assert len(without(ranking, first)) == len(ranking) - len(first)


def test_what_cannot_fit_is_not_compiled_as_a_standard() -> None:
    ranking = ranked_layouts()
    [large] = [r for r in ranking if (r.layout.rules, r.layout.param_rules) == DATA_PARALLEL]
    memory = large.plan.memory
    causes = {**memory.bytes_by_cause, "parameters": 17 * 2**30}
    memory = memory._replace(bytes_by_cause=causes, needed_bytes=sum(causes.values()))
    too_large = large._replace(plan=dataclasses.replace(large.plan, memory=memory))
    ranking = [*without(ranking, [large]), too_large]
    assert too_large.name not in {ranked.name for ranked in shortlist(ranking, [], 3)}


def test_a_program_that_the_compiler_refuses_is_no_compiled_one() -> None:
    """It says how much memory it needs; parts add up to that, and times are by the trace."""
    ranked = ranked_layouts()[0]
    estimate, arguments = ranked.plan.memory, 10**9
    refused = Compilation(None, None, "TPU", 58.0, needed_bytes=3 * 10**9)
    memory = refused.memory_of_failed(estimate, arguments)
    assert memory.needed_bytes == sum(memory.bytes_by_cause.values()) == 4 * 10**9
    assert (memory.compiled_for, memory.compile_s, memory.out_of_memory) == (None, None, True)
    plan = dataclasses.replace(ranked.plan, memory=memory)
    assert ranked._replace(plan=plan).basis == "trace" and plan.fits is False
    compiled = dataclasses.replace(ranked.plan, memory=estimate._replace(compiled_for="TPU"))
    assert ranked._replace(plan=compiled).basis == "compiler"


def test_a_search_goes_on_where_the_compiler_aborts() -> None:
    ranking = ranked_layouts()
    slow, fast = ranking[2], ranking[0]

    def compile_plan(layout: Layout) -> StepPlan:
        if layout == ranking[1].layout:
            raise CompilerAborted("the compiler aborts (SIGABRT).")
        return next(ranked.plan for ranked in ranking if ranked.layout == layout)

    compiled = compile_layouts([slow, ranking[1], fast], ranking[3:], compile_plan)
    assert [ranked.layout.rules for ranked in compiled] == [fast.layout.rules, slow.layout.rules]
    with pytest.raises(CompilerAborted, match="SIGABRT"):
        compile_layouts(ranking[1:2], ranking[3:], compile_plan)


def test_a_layout_that_cannot_be_traced_is_skipped() -> None:
    """Heads that do not divide stand for whatever the lint overlooks."""
    broken = Layout(mesh="data:16,model:8", rules="batch:data;d_kv:model")
    with optax_promotion():
        planned = plan_layouts(RUN, [broken, SPLIT], SLICE, [])
    assert [ranked.layout.rules for ranked in planned] == [SPLIT.rules]
