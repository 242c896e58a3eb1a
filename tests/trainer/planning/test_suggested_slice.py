"""Which slice holds a run that does not fit."""

import dataclasses
import math

import pytest

from layouts.cost.interconnect import Topology
from models.attention.multi_head import MultiHead
from tests.toys import SPLITTABLE, optax_promotion
from tests.trainer.planning.runs import layout_named, toy_run
from trainer.checks import record_loss
from trainer.planning.search import suggest_slice
from trainer.planning.training import StepPlan, plan_from_trace
from trainer.run import Run

RUN = toy_run(dataclasses.replace(SPLITTABLE, dropout=0.0, attention=MultiHead()))
LAYOUT = layout_named("data_parallel")


def planned(run: Run, slice_name: str) -> StepPlan:
    topology = Topology.named(slice_name)
    return plan_from_trace(run, LAYOUT, {"data": topology.devices}, topology)


@pytest.mark.parametrize(
    ("chips", "advice"),
    [
        (20, "about 40 devices: try --topology=v3:4x8."),
        (1025, "about 2,050 devices; the largest slice, v3:32x32, has 2,048."),
    ],
)
def test_the_smallest_slice_that_holds_the_run_is_one_that_exists(chips: int, advice: str) -> None:
    with optax_promotion():
        plan = planned(RUN, "v3:2x2")
    assert plan.topology is not None
    too_large = plan.memory._replace(needed_bytes=chips * plan.topology.chip.memory_bytes // 4)
    needs = suggest_slice(dataclasses.replace(plan, memory=too_large), plan.run)
    assert needs.endswith(advice)


def test_copies_of_weights_count_once() -> None:
    """Under data parallelism each of four chips has all weights."""
    with optax_promotion():
        plan = planned(RUN, "v3:2x2")
    memory, chip = plan.memory, Topology.named("v3:2x2").chip
    weights = 4 * sum(math.prod(w.shape) for w in record_loss(RUN).weights)
    assert plan.devices == 8 and memory.bytes_by_cause["parameters"] == weights
    large = memory._replace(
        bytes_by_cause={"parameters": weights, "optimizer state": 2 * chip.memory_bytes},
        needed_bytes=2 * chip.memory_bytes,
    )
    needs = suggest_slice(dataclasses.replace(plan, memory=large), RUN)
    assert "about 2 devices: a layout that shards weights may fit" in needs


def test_batch_and_model_split_over_the_slice_that_is_suggested() -> None:
    run = dataclasses.replace(RUN, batch_sequences=256)
    with optax_promotion():
        plan = planned(run, "v4:2x2x1")
    assert plan.topology is not None
    too_large = plan.memory._replace(needed_bytes=33 * plan.topology.chip.memory_bytes)  # 4 chips
    suggested = suggest_slice(dataclasses.replace(plan, memory=too_large), plan.run)
    # The next larger slice, v4:4x4x12, has 192 devices: neither batch nor weights divide by 3.
    assert suggested.endswith("about 132 devices: try --topology=v4:4x8x8.")
