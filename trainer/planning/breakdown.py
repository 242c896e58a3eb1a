"""Groups the time of a step by the part of the model in which it is spent."""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from layouts.cost.step_time import op_seconds
from trainer.planning.training import StepPlan

PART_OF_SCOPE = {
    "attention": "attention", "source_attention": "attention", "latent_attention": "attention",
    "mlp": "feed-forward", "experts": "experts", "gate": "gate", "dispatch": "dispatch",
    "combine": "combine", "convolutions": "convolutions", "norm": "norms", "embed": "embedding",
    "softmax_loss": "softmax", "optimizer": "optimizer",
}  # fmt: skip
OTHER = "other"
TIMED = ("products_s", "other_s", "traffic_s")  # what adds up to a step
MAX_LINES = 6  # of operations other than products


def part_of(scopes: str) -> str:
    """Returns the part of the model of an operation, given by its innermost known scope."""
    parts = (PART_OF_SCOPE.get(name) for name in reversed(re.findall(r"\w+", scopes)))
    return next((part for part in parts if part is not None), OTHER)


def time_by_part(plan: StepPlan, collectives: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Lists the time of each part of the model in a step, the longest first.

    `least_s` is the time of a part's products at the peak of the matrix units.
    """
    if plan.topology is None:
        return []
    chip, sums = plan.topology.chip, dict[str, dict[str, float]]()
    for op in plan.work.ops:
        part = sums.setdefault(part_of(op.scopes), defaultdict(float))
        part["products_s" if op.flops else "other_s"] += op_seconds(chip, op)
        part["least_s"] += op.times * op.flops / chip.peak_of(op.dtype)
    for row in collectives:
        part = sums.setdefault(row["model_part"], defaultdict(float))
        part["overlapped_s" if row["overlaps"] else "traffic_s"] += row["seconds"]
    names = (*TIMED, "overlapped_s", "least_s")
    rows = [{"part": part, **{name: row[name] for name in names}} for part, row in sums.items()]
    return sorted(rows, key=seconds_of, reverse=True)


def seconds_of(row: Mapping[str, Any]) -> float:
    """Returns the seconds that a part of the model adds to a step."""
    return sum(row[kind] for kind in TIMED)


def longest_other(plan: StepPlan) -> list[dict[str, Any]]:
    """Lists the lines of the model whose operations other than products take the longest."""
    if plan.topology is None:
        return []
    lines = defaultdict[tuple[str, str], float](float)
    for op in plan.work.ops:
        if not op.flops:
            lines[part_of(op.scopes), op.source] += op_seconds(plan.topology.chip, op)
    longest = sorted(lines.items(), key=lambda line: -line[1])[:MAX_LINES]
    return [{"part": part, "source": line, "seconds": s} for (part, line), s in longest]
