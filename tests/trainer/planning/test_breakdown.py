"""The time of a step by part of the model, counted by hand and of real steps."""

import dataclasses

import pytest

from layouts.cost.interconnect import Topology
from layouts.layout import Layout
from models.feed_forward.moe.layer import Moe
from models.parts import Block
from tests.toys import optax_promotion
from tests.trainer.planning.runs import DENSE, toy_run
from trainer.planning.breakdown import OTHER, part_of
from trainer.planning.report import as_json
from trainer.planning.training import plan_from_trace

LAYOUT = Layout(mesh="data:4", rules="batch:data;experts:data", param_rules="d_model:data")
SLICE = Topology.named("v5e:2x2")
EXPERTS = dataclasses.replace(
    DENSE,
    layers=2,
    dropout=0.0,
    pattern=(Block(), Block(feed_forward=Moe(experts=16, dispatch="einsum"))),
)


def test_the_innermost_scope_names_the_part() -> None:
    step = "jit(train_step)/transpose(jvp(layers))/while/body"
    assert part_of(f"{step}/experts/dispatch/Gsec,GsD->GecD/dot_general") == "dispatch"
    assert part_of(f"{step}/experts/EGcD,EDF->EGcF/dot_general") == "experts"
    assert part_of("jit(train_step)/transpose(jvp(softmax_loss))/add") == "softmax"
    assert part_of("jit(train_step)/add") == OTHER


def test_parts_add_up_to_the_step() -> None:
    with optax_promotion():
        plan = plan_from_trace(toy_run(EXPERTS), LAYOUT, {"data": 4}, SLICE)
    figures, timing = as_json(plan), plan.timing
    assert timing is not None
    rows = {row.pop("part"): row for row in figures["step_time_by_part"]}
    parts = {"attention", "feed-forward", "experts", "gate", "dispatch", "combine", "norms"}
    assert parts | {"embedding", "softmax", "optimizer"} <= {*rows}
    sums = {kind: sum(row[kind] for row in rows.values()) for kind in rows["attention"]}
    assert sums["products_s"] == pytest.approx(timing.products_s)
    assert sums["other_s"] == pytest.approx(timing.other_s)
    assert sums["traffic_s"] == pytest.approx(sum(timing.traffic_s.values()))
    flops = sum(op.times * op.flops for op in plan.work.ops)
    assert sums["least_s"] == pytest.approx(flops / SLICE.chip.peak_flops)
    optimizer = rows["optimizer"]  # reads and writes all weights and moments
    state_bytes = plan.memory.bytes_by_cause["parameters"]
    assert optimizer["products_s"] == 0
    assert optimizer["other_s"] > 2 * state_bytes / SLICE.chip.memory_bandwidth
    assert rows.get(OTHER, {"other_s": 0})["other_s"] < 0.2 * timing.other_s
    longest, *others = figures["longest_other"]
    assert longest["seconds"] >= max(other["seconds"] for other in others)
    assert longest["source"] == "weights and optimizer state" and ":" in others[0]["source"]
