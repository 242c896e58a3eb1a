"""What a run's own step costs: told from the compiled program before it runs, and held against."""

import time
from collections.abc import Callable
from typing import NamedTuple

import jax
from jax.sharding import Mesh

from layouts.cost.calibration import estimate_host_timing, measure_host
from layouts.cost.interconnect import Slice
from layouts.cost.step_time import Timing
from layouts.lint.warnings import size_text
from models.api import Batch
from trainer.planning.counts import Compilation
from trainer.planning.training import (
    StepCounts,
    StepPlan,
    TracedStep,
    count_step,
    estimate_step,
    plan_step,
)
from trainer.step import Metrics, State


class Foreseen(NamedTuple):
    """A training step, ready to run, and what it will cost."""

    step: Callable[[State, Batch], tuple[State, Metrics]]
    plan: StepPlan
    told: str


def foresee(step: TracedStep) -> Foreseen:
    """Compiles a step for the devices at hand, once, and reads the program that will run."""
    assert isinstance(step.mesh, Mesh)
    start = time.perf_counter()
    with jax.set_mesh(step.mesh):
        program = step.program.lower().compile()
    counted, of = counted_in(step, program, time.perf_counter() - start)
    slice = Slice.of(step.mesh.devices) if step.platform == "TPU" else None
    timing, why = None, f"no rates of {step.mesh.devices.flat[0].device_kind} are known"
    if step.platform == "CPU":
        timing, why = by_rates(step, counted)
    found = plan_step(step, slice, counted, timing)
    if slice is not None:
        why = f"the compiler's cycles and links of {slice.name}, at published rates"
    return Foreseen(program, found, f"{summary(found)}{of}\n{prediction(found, why)}")


def counted_in(step: TracedStep, program: object, compile_s: float) -> tuple[StepCounts, str]:
    """What is in the program; by its trace where a newer compiler's text is not understood."""
    try:
        return count_step(step, Compilation(program, step.platform, compile_s)), ""
    except Exception as error:  # whatever it is, it is no reason not to train
        return estimate_step(step), f"  By its trace, as its text cannot be read: {error!r}."


def by_rates(step: TracedStep, counted: StepCounts) -> tuple[Timing, str]:
    """A CPU's step at the rates that its devices reach now, all together, in large arrays."""
    assert isinstance(step.mesh, Mesh)
    host = measure_host(step.mesh.local_devices)
    alone = step.mesh.size == host.devices
    sent = counted.work.collectives if alone else ()
    timing = estimate_host_timing(host, step.sizes, step.cost.ops, sent)
    parts = [
        f"{timing.products_s:.3g} s of products at {scaled(host.flops_per_s, 'FLOP/s')}",
        f"{timing.other_s:.3g} s of other work at {scaled(host.bytes_per_s, 'B/s')}",
    ]
    if timing.traffic_s:
        parts.append(f"{sum(timing.traffic_s.values()):.3g} s of traffic")
    if not alone:
        parts.append("traffic between processes not counted")
    return timing, f"{', '.join(parts)}, as large arrays reach here now; small ones take longer"


def summary(found: StepPlan) -> str:
    """Memory, FLOPs and traffic of a step in one line."""
    causes = sorted(found.memory.bytes_by_cause.items(), key=lambda item: -item[1])
    parts = ", ".join(f"{name} {size_text(size)}" for name, size in causes if size)
    received = sum(own.received_bytes for own in found.work.collectives)
    return (
        f"The step: {size_text(found.memory.needed_bytes)} a device ({parts}), "
        f"{scaled(found.executed_flops, 'FLOPs')} "
        f"(the model asks for {scaled(found.model_flops, 'FLOPs')}), "
        f"{size_text(received)} of traffic a device."
    )


def prediction(found: StepPlan, why: str) -> str:
    if found.step_s is None:
        return f"No time is predicted: {why}."
    return f"Predicted: {found.step_s:.3g} s a step, by {why}."


def scaled(amount: float, unit: str) -> str:
    """
    >>> scaled(34_628_173_824, "FLOPs"), scaled(33_000_000, "B/s")
    ('34.6 GFLOPs', '33 MB/s')
    """
    prefixes = iter(" kMGTPE")
    prefix = next(prefixes).strip()
    while amount >= 1000:
        amount, prefix = amount / 1000, next(prefixes)
    return f"{amount:.3g} {prefix}{unit}"


def held_against(step_s: float, foreseen_s: float | None) -> str:
    """How long steps took, beside what was predicted."""
    if foreseen_s is None:
        return f"{step_s:.3g} s a step measured; no prediction."
    off = step_s / foreseen_s - 1
    return f"{step_s:.3g} s a step measured, {foreseen_s:.3g} s predicted ({off:+.0%})."
