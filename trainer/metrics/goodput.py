"""Sums up how a run spent its time, over all its starts, from the files in its folder."""

import logging
import math
import tomllib
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from datetime import datetime
from operator import itemgetter
from pathlib import Path

import numpy as np

from trainer.checkpoints.interval import HOUR_S
from trainer.metrics import jsonl
from trainer.metrics.jsonl import WALL_TIME, Line
from trainer.metrics.step_timer import ACTIVITIES
from trainer.resume.history import starts

logger = logging.getLogger(__name__)

USES: Mapping[str, str] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
IN_STEPS = ("device", "data", "host")


def spent_seconds(model_dir: Path) -> dict[str, float]:
    """Returns the seconds of a run for each of `USES`; nothing if its files lack times.

    The time begins with the first start, and ends with the last line of metrics or evaluations.
    """
    kept, checks = (timed_lines(model_dir / x) for x in (jsonl.METRICS, jsonl.EVALUATIONS))
    records = [(r.step, datetime.fromisoformat(r.time).timestamp()) for r in starts(model_dir)]
    begins = [begin for _, begin in records]
    if begins != sorted(begins) or kept != sorted(kept, key=itemgetter("step")):
        logger.warning("%s: the clock went back during the run: no goodput.", model_dir)
        return {}
    replaced = timed_lines(model_dir / f"{jsonl.METRICS}{jsonl.REPLACED}")
    lines, ends = sorted([*kept, *replaced], key=itemgetter(WALL_TIME)), [*begins[1:], math.inf]
    pieces = [
        (step, begin, end, of_start)
        for (step, begin), end in zip(records, ends, strict=False)  # without records, one end
        if (of_start := between(lines, begin, end))  # another start made no step
    ]
    if not pieces:
        return {}
    seconds: dict[str, float] = dict.fromkeys(USES, 0.0)
    ended = begins[0]
    for (first, begin, end, of_start), following in zip(pieces, [*pieces[1:], None], strict=True):
        seconds["stopped"] += begin - ended
        for use, spent_s in _spent(first, begin, of_start, following and following[0]).items():
            seconds[use] += spent_s
        last = of_start[-1]
        ended = max(x[WALL_TIME] for x in [last, *between(checks, last[WALL_TIME], end)])
        seconds["evaluation"] += ended - last[WALL_TIME]
    return {use: seconds[use] for use in USES if seconds[use] > 0}


def describe(seconds: Mapping[str, float]) -> str:
    """Describes how a run spent its time, the largest use first."""
    total_s = sum(seconds.values())
    shares = {use: spent_s / total_s for use, spent_s in seconds.items()}
    rest = sorted((use for use in shares if use != "steps"), key=shares.__getitem__, reverse=True)
    length = f"{total_s:,.1f} s" if total_s < HOUR_S else f"{total_s / HOUR_S:,.1f} hours"
    others = ", ".join(f"{use} {shares[use]:.1%}" for use in rest)
    return f"Goodput {shares.get('steps', 0.0):.1%} of {length}: {others}."


def _spent(step: int, begin: float, lines: Sequence[Line], kept: int | None) -> dict[str, float]:
    """Returns the seconds by use of a start at `step`, whose steps after `kept` were repeated."""
    names, steps = ("host", *ACTIVITIES), [step, *(line["step"] for line in lines)]
    totals = [{name: line.get(f"{name}_total_s") or 0.0 for name in names} for line in lines]
    last = made = totals[-1]
    if kept is not None:  # assumes that the steps between two lines take equally long
        spent = {name: [0.0, *(each[name] for each in totals)] for name in IN_STEPS}
        made = {name: float(np.interp(kept, steps, spent[name])) for name in IN_STEPS}
    seconds = last | {name: made[name] for name in IN_STEPS}
    return {
        "steps": seconds.pop("device"),
        "repeated": sum(last[name] - made[name] for name in IN_STEPS),
        "starting": lines[-1][WALL_TIME] - begin - sum(last.values()),
        **seconds,
    }


def timed_lines(path: Path) -> list[Line]:
    """Returns the lines of a file that have a time, ordered by this time."""
    lines = [line for line in jsonl.read_lines(path) if jsonl.is_number(line.get(WALL_TIME))]
    return sorted(lines, key=itemgetter(WALL_TIME))


def between(lines: Sequence[Line], begin: float, end: float) -> Sequence[Line]:
    """Returns the lines written in a period of time, from lines ordered by time."""
    first, last = (bisect_left(lines, time, key=itemgetter(WALL_TIME)) for time in (begin, end))
    return lines[first:last]
