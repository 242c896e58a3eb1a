"""Sweeps of settings: what is compared, and that the fewest microbatches that fit are taken."""

import dataclasses

import pytest

from layouts.cost.interconnect import Topology
from layouts.layout import Layout
from layouts.mesh import mesh_sizes
from models.attention.multi_head import MultiHead
from tests.toys import SPLITTABLE, optax_promotion
from tests.trainer.planning.runs import layout_named, toy_run
from trainer.planning import sweep as sweep_module
from trainer.planning.sweep import least_microbatches, recomputations, sweep, variants
from trainer.planning.training import plan_from_trace
from trainer.run import Run

RUN = toy_run(dataclasses.replace(SPLITTABLE, dropout=0.0, attention=MultiHead()))
LAYOUTS = {name: layout_named(name) for name in ("data_parallel", "fsdp")}


def with_memory(memory_bytes: float) -> Topology:
    """Returns a slice whose devices have so much memory."""
    topology = Topology.named("v5e:2x2")
    chip = topology.chip._replace(memory_bytes=int(memory_bytes))
    return dataclasses.replace(topology, chip=chip)


def needed_bytes(microbatches: int) -> int:
    run, layout, topology = (
        dataclasses.replace(RUN, microbatches=microbatches),
        LAYOUTS["fsdp"],
        with_memory(1e9),
    )
    sizes = mesh_sizes(layout.mesh, topology.devices)
    return plan_from_trace(run, layout, sizes, topology).memory.needed_bytes


def test_the_fewest_microbatches_that_fit_are_taken() -> None:
    with optax_promotion():
        needs = {count: needed_bytes(count) for count in (1, 2, 4)}
        assert needs[1] > needs[2] > needs[4]
        for count, size in needs.items():
            plan = least_microbatches(RUN, LAYOUTS["fsdp"], with_memory(size))
            assert plan is not None and plan.run.microbatches == count
        # 16 rows in 8 microbatches do not divide over 4 devices.
        assert least_microbatches(RUN, LAYOUTS["fsdp"], with_memory(needs[4] - 1)) is None


def test_no_number_of_microbatches_is_planned_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    planned = []

    def too_large(run: Run, layout: Layout, topology: Topology) -> None:
        planned.append(run.microbatches)

    monkeypatch.setattr(sweep_module, "plan_if_traceable", too_large)
    for rows, counts in ((16, [1, 4]), (4, [1])):
        run = dataclasses.replace(RUN, batch_sequences=rows)
        assert least_microbatches(run, LAYOUTS["fsdp"], with_memory(1e9)) is None
        assert planned == counts
        planned.clear()


def test_a_sweep_is_sorted_by_its_chip_hours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep_module, "recomputations", lambda model: [model])
    monkeypatch.setattr(sweep_module, "BATCH_FACTORS", (1, 2))
    topology = with_memory(1e9)
    with optax_promotion():
        points = sweep(RUN, LAYOUTS, topology)
    settings = [tuple(point.settings.items()) for point in points]
    assert len(set(settings)) == len(points) == 2 * 2 * 2  # batch, precision, layout
    hours = [point.chip_hours for point in points]
    assert hours == sorted(hours)
    for point in points:
        run, plan = point.plan.run, point.plan
        steps = RUN.steps * RUN.batch_sequences / run.batch_sequences  # for as many tokens
        assert point.chip_hours == pytest.approx(4 * steps * plan.step_s / 3600)


def test_a_model_that_saves_products_is_compared_with_others() -> None:
    """Without recomputation it has none to save."""
    model = dataclasses.replace(SPLITTABLE, remat="full", remat_saves=("mlpwi",))
    kinds = [(kind.remat, kind.remat_saves) for kind in recomputations(model)]
    assert kinds[0] == ("full", ("mlpwi",)) and len(set(kinds)) == len(kinds)
    assert {("none", ()), ("full", ()), ("full", sweep_module.PROJECTIONS)} < set(kinds)


def test_half_a_row_is_no_batch() -> None:
    rows = {run.batch_sequences for run in variants(dataclasses.replace(RUN, batch_sequences=5))}
    assert rows == {5, 10}
