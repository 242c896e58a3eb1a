"""The cost of a whole run: compared with runs whose failures are drawn at random."""

import dataclasses
import math

import numpy as np
import pytest

from layouts.cost.interconnect import Topology
from layouts.cost.step_time import Timing
from layouts.mesh import mesh_sizes
from models.attention.multi_head import MultiHead
from tests.toys import SPLITTABLE, optax_promotion
from tests.trainer.planning.runs import layout_named, toy_run
from trainer.checkpoints.interval import DAY_S, HOUR_S
from trainer.planning.run_cost import Assumptions, hours_of, run_cost, saving_of
from trainer.planning.training import StepPlan, plan_from_trace

STEPS, STEP_S = 20_000, 2.0


@pytest.fixture(scope="module")
def plan() -> StepPlan:
    run = toy_run(dataclasses.replace(SPLITTABLE, dropout=0.0, attention=MultiHead()))
    layout, topology = layout_named("fsdp"), Topology.named("v5e:2x2")
    with optax_promotion():
        plan = plan_from_trace(run, layout, mesh_sizes(layout.mesh, topology.devices), topology)
    timing = Timing(STEP_S, 0.0, traffic_s={}, overlapped_s={})
    run = dataclasses.replace(plan.run, steps=STEPS, checkpoint_every=100)
    return dataclasses.replace(plan, run=run, timing=timing, checkpoint_bytes=40 * 10**9)


def simulated_s(
    plan: StepPlan, assumed: Assumptions, copy_s: float, rng: np.random.Generator
) -> float:
    """Runs event by event: returns the seconds until the last step."""
    every, write_s = plan.run.checkpoint_every, plan.checkpoint_bytes / 1e9
    rate = assumed.failures_per_chip_day * 4 / DAY_S
    now, saved, step = 0.0, 0, 0
    failure = rng.exponential(1 / rate)
    written: list[tuple[float, int]] = []
    while step < STEPS:
        now += STEP_S
        step += 1
        if step % every == 0:
            now += copy_s
            written.append((now + write_s, step))
        if now >= failure:
            saved = max([s for end, s in written if end <= failure], default=saved)
            written = []
            now = failure + 60 * assumed.restart_minutes + write_s
            step = saved
            failure = now + rng.exponential(1 / rate)
    return now


@pytest.mark.parametrize(
    ("rate", "restart_minutes", "checkpoint_bytes"),
    [(2.0, 10.0, 40 * 10**9), (5.0, 0.0, 15 * 10**10)],
)
def test_failures_take_as_long_as_in_runs_that_fail_at_random(
    plan: StepPlan, rate: float, restart_minutes: float, checkpoint_bytes: int
) -> None:
    """First the restart takes most of it, then the reading and writing of checkpoints."""
    shards = {"parameters": checkpoint_bytes // 4, "optimizer state": 0}  # of four devices
    memory = plan.memory._replace(bytes_by_cause=shards)
    plan = dataclasses.replace(plan, checkpoint_bytes=checkpoint_bytes, memory=memory)
    assumed = Assumptions(failures_per_chip_day=rate, restart_minutes=restart_minutes)
    cost = run_cost(plan, assumed, None)
    assert cost is not None
    rng = np.random.default_rng(0)
    runs = [simulated_s(plan, assumed, cost["copy_s"], rng) for _ in range(200)]
    assert cost["wall_hours"] == pytest.approx(np.mean(runs) / HOUR_S, rel=0.02)
    assert sum(cost["hours"].values()) == pytest.approx(cost["wall_hours"])
    assert cost["hours"]["steps"] == pytest.approx(STEPS * STEP_S / HOUR_S)
    assert cost["failures"] == pytest.approx(rate * 4 * cost["wall_hours"] / 24)
    assert cost["chip_hours"] == pytest.approx(4 * cost["wall_hours"])
    low, high = cost["wall_hours_range"]
    assert low < cost["wall_hours"] < high


def test_the_best_interval_is_the_best_of_all(plan: StepPlan) -> None:
    assumed = Assumptions(failures_per_chip_day=1.0)
    slow = dataclasses.replace(
        plan,
        memory=plan.memory._replace(bytes_by_cause={"parameters": 10**12, "optimizer state": 0}),
        checkpoint_bytes=10**9,
    )
    cost, saving = run_cost(slow, assumed, None), saving_of(slow, assumed)
    assert cost is not None and saving.copy_s > saving.write_s
    hours = {every: sum(hours_of(slow, assumed, every).values()) for every in range(1, 5000, 7)}
    assert cost["best_hours"] <= min(hours.values()) * 1.002
    assert cost["best_hours"] < cost["wall_hours"]


def test_the_best_interval_is_no_shorter_than_a_write(plan: StepPlan) -> None:
    """A write takes 1.3 steps, and a save almost no time: one after each step would wait."""
    shards = {"parameters": 10**6, "optimizer state": 0}
    plan = dataclasses.replace(
        plan, memory=plan.memory._replace(bytes_by_cause=shards), checkpoint_bytes=26 * 10**8
    )
    cost = run_cost(plan, Assumptions(failures_per_chip_day=1.0), None)
    assert cost is not None and cost["write_s"] == pytest.approx(1.3 * STEP_S)
    assert cost["best_checkpoint_every"] == 2


def test_a_save_waits_for_the_one_before(plan: StepPlan) -> None:
    """A checkpoint of 40 GB takes 40 s; saving each 4 s, training waits 36 s."""
    hours = hours_of(plan, Assumptions(), every=2)
    assert hours["checkpoints"] == pytest.approx(STEPS / 2 * 36 / HOUR_S, rel=0.01)


def test_the_first_save_waits_for_none_and_the_run_for_the_last(plan: StepPlan) -> None:
    saving, half = saving_of(plan, Assumptions()), STEPS // 2
    assert saving.write_s < half * STEP_S
    for every, saves in ((STEPS, 1), (half, 2)):
        hours = hours_of(plan, Assumptions(), every)
        expected_s = saves * saving.copy_s + saving.write_s
        assert hours["checkpoints"] * HOUR_S == pytest.approx(expected_s)


def test_evaluations_count_where_their_batches_are_known(plan: StepPlan) -> None:
    run = dataclasses.replace(plan.run, evaluate_every=1000, evaluate_batches=30)
    counted = dataclasses.replace(plan, run=run)
    hours = hours_of(counted, Assumptions(), every=100)
    assert hours["evaluations"] == pytest.approx(20 * 30 * STEP_S / 3 / HOUR_S)


def test_a_run_that_never_ends_has_no_length(plan: StepPlan) -> None:
    cost = run_cost(plan, Assumptions(failures_per_chip_day=1.0, restart_minutes=9000), 2.0)
    assert cost is not None and cost["wall_hours"] is None and cost["price"] is None
    assert cost["goodput"] == 0 and math.inf not in cost["hours"].values()


def test_replays_take_a_step_each_and_a_copy_of_the_state(plan: StepPlan) -> None:
    run = dataclasses.replace(plan.run, replay_every=300)
    replayed = dataclasses.replace(plan, run=run)
    hours, before = (hours_of(p, Assumptions(), every=100) for p in (replayed, plan))
    assert "replays" not in before
    assert hours["replays"] == pytest.approx(hours["steps"] * math.ceil(STEPS / 300) / STEPS)
    layout, topology = layout_named("fsdp"), Topology.named("v5e:2x2")
    with optax_promotion():
        memory = plan_from_trace(
            run, layout, mesh_sizes(layout.mesh, topology.devices), topology
        ).memory
    causes = dict(memory.bytes_by_cause)
    assert causes.pop("state of replays") == causes["parameters"] + causes["optimizer state"]
    assert causes == plan.memory.bytes_by_cause
    assert memory.needed_bytes - plan.memory.needed_bytes == sum(
        causes[name] for name in ("parameters", "optimizer state")
    )
