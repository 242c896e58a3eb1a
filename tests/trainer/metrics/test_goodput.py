"""Where the time of a run went, against runs whose every second is known."""

import json
import random
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

import pytest

from trainer.metrics.goodput import USES, describe, spent_seconds
from trainer.metrics.jsonl import METRICS, REPLACED
from trainer.metrics.step_timer import ACTIVITIES
from trainer.resume.history import Start, record_start

START = 1_700_000_000


class SimulatedRun:
    """Writes the files of a run that is killed now and then, and counts each second itself."""

    def __init__(self, folder: Path, seed: int):
        self.folder, self.random, self.time = folder, random.Random(seed), float(START)
        self.step = self.saved = 0
        self.truth = Counter[str]()
        self.lines, self.replaced = list[dict[str, float]](), list[dict[str, float]]()
        self.checks = list[dict[str, float]]()

    def spend(self, use: str, totals: Counter[str]) -> None:
        seconds = self.random.randint(1, 9)
        self.time += seconds
        totals[use] += seconds

    def fail_to_start(self) -> None:
        """Is killed before the first line of metrics."""
        if self.time > START:
            self.time += 5
            self.truth["stopped"] += 5
        now = datetime.fromtimestamp(self.time, UTC).strftime("%Y-%m-%dT%H:%M:%S%z")
        record_start(self.folder, Start(self.saved, now))
        self.time += 10
        self.truth["stopped"] += 10

    def start(self, steps: int) -> None:
        """Trains until the step, which is the last one, or one at which the run is killed."""
        if self.time > START:
            stopped = self.random.randint(20, 50)
            self.time += stopped
            self.truth["stopped"] += stopped
        self.step = self.saved
        now = datetime.fromtimestamp(self.time, UTC).strftime("%Y-%m-%dT%H:%M:%S%z")
        record_start(self.folder, Start(self.saved, now))
        self.replaced += [line for line in self.lines if line["step"] > self.saved]
        self.lines = [line for line in self.lines if line["step"] <= self.saved]
        totals, outside = Counter[str](), Counter[str]()
        self.spend("starting", outside)
        for use in ("restore", "compile"):
            self.spend(use, totals)
        kept = unsaved = Counter[str]()
        while self.step < steps:
            before = totals.copy()
            for use in ("data", "device", "host"):
                self.spend(use, totals)
            unsaved = unsaved + totals - before
            self.step += 1
            spent = {f"{use}_total_s": totals[use] for use in ("host", *ACTIVITIES)}
            self.lines.append({"step": self.step, "loss": 1.0, "wall_time": self.time, **spent})
            if self.step % 3 == 0:
                self.spend("evaluation", totals)
                self.checks.append({"step": self.step, "loss": 1.0, "wall_time": self.time})
                self.saved, kept, unsaved = self.step, kept + unsaved, Counter[str]()
        if self.step % 3 == 0:
            unsaved = Counter[str]()
        totals.update(outside)
        for use in ("data", "device", "host"):
            totals[use] = kept[use]
        totals["repeated"] = unsaved.total()
        totals["steps"] = totals.pop("device")
        self.truth.update(totals)
        for name, lines in (
            (METRICS, self.lines), (METRICS + REPLACED, self.replaced),
            ("evaluations.jsonl", self.checks),
        ):  # fmt: skip
            text = "".join(json.dumps(line) + "\n" for line in lines)
            (self.folder / name).write_text(text)


@pytest.mark.parametrize("seed", range(5))
def test_all_seconds_of_a_run_are_counted_once(tmp_path: Path, seed: int) -> None:
    run = SimulatedRun(tmp_path, seed)
    for _ in range(run.random.randint(0, 4)):
        if run.random.random() < 0.5:
            run.fail_to_start()
        run.start(run.saved + run.random.randint(1, 8))
    run.start(run.saved + 6)
    seconds = spent_seconds(tmp_path)
    assert seconds == pytest.approx({use: run.truth[use] for use in USES if run.truth[use]})
    assert sum(seconds.values()) == pytest.approx(run.time - START)


def test_steps_between_two_lines_are_equally_long(tmp_path: Path) -> None:
    """The checkpoint of step 30 is in the middle of two lines."""
    for step, begin in ((0, START), (30, START + 100)):
        now = datetime.fromtimestamp(begin, UTC).strftime("%Y-%m-%dT%H:%M:%S%z")
        record_start(tmp_path, Start(step, now))

    def line(step: int, seconds: float, device_s: float) -> str:
        spent = dict.fromkeys((f"{use}_total_s" for use in ("host", *ACTIVITIES)), 0.0)
        spent |= {"device_total_s": device_s}
        return json.dumps({"step": step, "loss": 1.0, "wall_time": START + seconds, **spent}) + "\n"

    (tmp_path / METRICS).write_text(line(20, 20, 20) + line(60, 130, 30))
    (tmp_path / (METRICS + REPLACED)).write_text(line(40, 60, 60))
    seconds = spent_seconds(tmp_path)
    assert seconds == pytest.approx({"steps": 40 + 30, "repeated": 20, "stopped": 40})


def test_a_clock_that_goes_back_leaves_no_goodput(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = SimulatedRun(tmp_path, 1)
    run.start(4)
    metrics = tmp_path / METRICS
    whole = metrics.read_text()
    assert spent_seconds(tmp_path) and not caplog.text
    metrics.write_text(
        whole.replace(f'"wall_time": {run.lines[-1]["wall_time"]}', '"wall_time": 9')
    )
    assert spent_seconds(tmp_path) == {} and "the clock went back" in caplog.text
    metrics.write_text(whole)
    record_start(tmp_path, Start(3, "2001-01-01T00:00:00+0000"))
    assert spent_seconds(tmp_path) == {}


def test_files_without_times_have_no_goodput(tmp_path: Path) -> None:
    assert spent_seconds(tmp_path) == {}
    record_start(tmp_path, Start(0, "2026-01-01T00:00:00+0000"))
    (tmp_path / METRICS).write_text('{"step": 1, "loss": 2.0}\n')
    assert spent_seconds(tmp_path) == {}


def test_what_took_the_time_is_told_in_a_line() -> None:
    line = describe({"compile": 15.0, "steps": 45.0, "data": 0.1})
    assert line == "Goodput 74.9% of 60.1 s: compile 25.0%, data 0.2%."
