"""Plans a run with one kind of change at a time, to find changes that make its step faster."""

import dataclasses
import functools
import itertools
import logging
from collections.abc import Iterator, Sequence
from typing import Any, get_args

from layouts.cost.collectives import format_mesh
from layouts.cost.interconnect import Topology
from layouts.layout import Layout
from layouts.lint.report import lint
from layouts.mesh import batch_shards, mesh_sizes
from models.feed_forward.moe.layer import Dispatch, Moe
from models.parts import FeedForward
from models.transformer import Transformer
from trainer.checks import record_loss
from trainer.planning import search
from trainer.planning.training import StepPlan, plan_from_trace
from trainer.planning.tune import MICROBATCHES, Candidate, divides, recomputations
from trainer.run import Run

logger = logging.getLogger(__name__)


def alternatives(plan: StepPlan, stages: Sequence[Run]) -> list[dict[str, Any]]:
    """Lists variants of the plan's run with one kind of change: those that fit first, by time.

    Time and memory come from traces, scaled by the ratio of the plan to its own trace.
    All settings are legal in all stages of the run.
    """
    topology, needed_bytes = plan.topology, plan.memory.needed_bytes
    assert topology is not None and plan.step_s is not None
    layout = dataclasses.replace(plan.layout, mesh=format_mesh(plan.mesh))
    run, *others = dict.fromkeys(single_changes(plan.run, stages, layout, topology))
    before = settings(run)
    others = [other for other in others if settings(other) != before]
    traced = plan_from_trace(*run, dict(plan.mesh), topology)
    time_ratio = plan.step_s / search.known_step_s(traced)
    memory_ratio = needed_bytes / traced.memory.needed_bytes
    rows = []
    for number, candidate in enumerate(others, 1):
        if (other := search.plan_if_traceable(*candidate, topology)) is None:
            continue
        if candidate.layout != layout:
            other = search.with_best_order(other)
            candidate = candidate._replace(layout=other.layout)
        step_s = time_ratio * search.known_step_s(other)
        size = round(memory_ratio * other.memory.needed_bytes)
        row: dict[str, Any] = {
            "settings": {n: v for n, v in settings(candidate).items() if v != before[n]},
            "step_time_s": step_s,
            "time_change": step_s / plan.step_s - 1,
            "bytes_per_device": size,
            "fits": size <= topology.chip.memory_bytes,
        }
        logger.info("%d of %d: %.4g s: %s", number, len(others), step_s, row["settings"])
        rows.append(row)
    return sorted(rows, key=lambda row: (not row["fits"], row["step_time_s"], len(row["settings"])))


def single_changes(
    run: Run, stages: Sequence[Run], layout: Layout, topology: Topology
) -> Iterator[Candidate]:
    """Yields the run, then variants with other recomputation, dispatch, microbatches, layouts."""
    yield Candidate(run, layout)
    if isinstance(run.model, Transformer):
        for model in recomputations(run.model, offload=True):
            yield Candidate(dataclasses.replace(run, model=model), layout)
        for dispatch in get_args(Dispatch) if run.model.moes else ():
            model = run.model.with_feed_forward(functools.partial(dispatched, dispatch))
            yield Candidate(dataclasses.replace(run, model=model), layout)
    record, sizes = record_loss(run), mesh_sizes(layout.mesh, topology.devices)
    for count in range(1, MICROBATCHES[-1] + 1):
        if divides(stages, count, batch_shards(layout, sizes)):
            yield Candidate(dataclasses.replace(run, microbatches=count), layout)
    if topology.count > 1 and not topology.is_gpu:
        return  # layouts of several slices are not searched
    layouts = {
        other
        for other in search.candidates(record, topology.devices, run.microbatch_rows)
        if (other.rules, other.param_rules) in search.STANDARD
    }
    for less, more in itertools.permutations(sizes, 2):
        if sizes[less] % 2 == 0:
            moved = sizes | {less: sizes[less] // 2, more: sizes[more] * 2}
            other = dataclasses.replace(layout, mesh=format_mesh(moved), order=None)
            if not any(p.severity == "error" for p in lint(other, moved, record, {})):
                layouts.add(other)
    legal = search.legal_layouts(stages, topology.devices, layouts)
    for other in search.drop_oversized(run, legal, topology):
        yield Candidate(run, other)


def settings(candidate: Candidate) -> dict[str, Any]:
    """Lists the settings that differ between alternatives."""
    model = candidate.run.model
    kinds = {moe.dispatch for moe in model.moes} if isinstance(model, Transformer) else ()
    return candidate.settings | {"Moe.dispatch": ", ".join(sorted(kinds))}


def dispatched(dispatch: Dispatch, part: FeedForward) -> FeedForward:
    """Returns MoE layers with this dispatch, and other parts unchanged."""
    return dataclasses.replace(part, dispatch=dispatch) if isinstance(part, Moe) else part
