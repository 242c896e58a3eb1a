"""Predicts the cost of an entire run: its steps, checkpoints, evaluations and failures.

Devices fail at a constant rate.  After a failure, the run restarts from its newest complete
checkpoint.  Checkpoints are written while training continues, so a save stops training only until
the state is in the hosts' memory.
"""

import math
from typing import TYPE_CHECKING, Any, NamedTuple

from trainer.checkpoints.interval import DAY_S, FAILURES_PER_CHIP_DAY, HOUR_S, best_interval

if TYPE_CHECKING:  # the command line reads the defaults below without JAX
    from trainer.planning.training import StepPlan

RATES = (0.5, 4.0)
"""The range of failure rates, relative to the given rate."""
FORWARD = 1 / 3
"""Time of an evaluation batch, relative to a training step."""


class Assumptions(NamedTuple):
    """Holds assumptions that neither a compiler nor a run file provides."""

    failures_per_chip_day: float = FAILURES_PER_CHIP_DAY
    restart_minutes: float = 10.0
    """From a failure to the restore: devices are replaced, processes start, the step compiles."""
    storage_gb_per_s: float = 1.0
    """Between a host and the storage of checkpoints, in each direction, in 1e9 bytes per second."""


ASSUMED = Assumptions()


class Saving(NamedTuple):
    """Holds the seconds of a checkpoint's phases."""

    copy_s: float
    """From devices to hosts, while training waits."""
    write_s: float
    """From hosts to the storage, while training continues."""
    restore_s: float


def saving_of(plan: "StepPlan", assumed: Assumptions) -> Saving:
    """Predicts the times of a checkpoint; the hosts share the writing."""
    topology = plan.topology
    assert topology is not None
    rate = 1e9 * assumed.storage_gb_per_s
    causes = plan.memory.bytes_by_cause
    device_bytes = causes["parameters"] + causes["optimizer state"]
    host_bytes = device_bytes * topology.devices / topology.hosts
    write_s = plan.checkpoint_bytes / topology.hosts / rate
    restore_s = min(host_bytes, plan.checkpoint_bytes) / rate
    return Saving(device_bytes / topology.chip.host_bandwidth, write_s, restore_s)


def run_cost(plan: "StepPlan", assumed: Assumptions, price: float | None) -> dict[str, Any] | None:
    """Lists the costs of a run; None if its length, step time or devices are unknown.

    `price` is the price of a chip-hour.
    """
    step_s, topology, run = plan.step_s, plan.topology, plan.run
    if step_s is None or topology is None or plan.timing is None or run.steps is None:
        return None
    saving = saving_of(plan, assumed)
    failures_per_s = assumed.failures_per_chip_day * topology.chips / DAY_S
    best = best_interval(saving.copy_s, step_s, failures_per_s, saving.write_s)
    best = min(best, run.steps)
    every = best if run.checkpoint_every == "auto" else run.checkpoint_every
    hours = hours_of(plan, assumed, every)
    steps_s = plan.timing.range_s if topology.is_gpu else (step_s, step_s)
    pairs = zip(steps_s, RATES, strict=True)
    ends = [sum(hours_of(plan, assumed, every, *pair).values()) for pair in pairs]
    all_hours = sum(hours.values())
    cost: dict[str, Any] = {
        "assumptions": assumed._asdict(),
        "checkpoint_bytes": plan.checkpoint_bytes,
        **saving._asdict(),
        "hours": hours,
        "failures": failures_per_s * HOUR_S * all_hours,
        "goodput": hours["steps"] / all_hours,
        "checkpoint_every": every,
        "best_checkpoint_every": best,
        "best_hours": sum(hours_of(plan, assumed, best).values()),
        "wall_hours": all_hours,
        "wall_hours_range": ends,
        "chip_hours": all_hours * topology.chips,
    }
    if price is not None:
        cost["price"] = price * all_hours * topology.chips
        cost["price_range"] = [price * end * topology.chips for end in ends]
    from trainer.metrics.jsonl import finite

    return finite(cost)


def hours_of(
    plan: "StepPlan", assumed: Assumptions, every: int, step_s: float | None = None, rate: float = 1
) -> dict[str, float]:
    """Predicts the hours of a run by cause; it saves a checkpoint every `every` steps.

    A failure costs the restart, the restore, half an interval, and the steps during which the
    newest checkpoint was written.  The hours are infinite if failures come faster than a run
    recovers.
    """
    run, topology, steps = plan.run, plan.topology, plan.run.total_steps
    saving = saving_of(plan, assumed)
    step_s = plan.step_s if step_s is None else step_s
    assert step_s is not None and topology is not None
    every = min(every, steps)
    wait_s = max(0.0, saving.write_s - every * step_s)  # for the checkpoint before
    saves = math.ceil(steps / every)
    saves_s = saves * saving.copy_s + (saves - 1) * wait_s + saving.write_s
    evaluations = 1 if run.evaluate_every is None else math.ceil(steps / run.evaluate_every)
    evaluating_s = evaluations * (run.evaluate_batches or 0) * step_s * FORWARD
    replaying_s = math.ceil(steps / run.replay_every) * step_s if run.replay_every else 0.0
    planned_s = steps * step_s + replaying_s + saves_s + evaluating_s
    interval_s = planned_s * every / steps
    lost_s = 60 * assumed.restart_minutes + saving.restore_s + interval_s / 2 + saving.write_s
    lost = rate * assumed.failures_per_chip_day * topology.chips / DAY_S * lost_s  # of all time
    failing_s = planned_s * lost / (1 - lost) if lost < 1 else math.inf
    seconds = {"steps": steps * step_s, "checkpoints": saves_s, "failures": failing_s}
    if run.evaluate_batches is not None:
        seconds["evaluations"] = evaluating_s
    if run.replay_every is not None:
        seconds["replays"] = replaying_s
    return {name: value / HOUR_S for name, value in seconds.items()}
