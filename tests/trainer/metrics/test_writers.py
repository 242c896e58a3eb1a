"""Files of numbers: they stay in step with the run, whatever killed it."""

import contextlib
import dataclasses
import io
import json
import math
import sys
from pathlib import Path

import pytest
from PIL import Image

from configs.errors import RunError
from data.storage.files import atomic_write
from tests.toys import TOY
from tests.trainer.planning.runs import TASK
from trainer.metrics import writers
from trainer.metrics.jsonl import read_lines
from trainer.metrics.writers import LossPlot, MetricsFile, MetricsWriter
from trainer.observers import Observer, Observers, StepResult
from trainer.run import Run


def steps(path: Path) -> list[float]:
    return [line["step"] for line in read_lines(path)]


def without_times(path: Path) -> list[dict[str, float]]:
    return [{k: x for k, x in line.items() if k != "wall_time"} for line in read_lines(path)]


def test_lines_after_the_restored_step_move_to_a_file_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first = MetricsFile(path, 0)
    for step in range(1, 8):
        first.write({"step": step, "loss": 10.0 - step})
    first.close()
    second = MetricsFile(path, 4)
    assert steps(path) == [1, 2, 3, 4]
    second.write({"step": 5, "loss": 0.1})
    second.close()
    assert without_times(path)[3:] == [{"step": 4, "loss": 6.0}, {"step": 5, "loss": 0.1}]
    MetricsFile(path, 0).close()
    assert path.read_text() == ""
    assert steps(tmp_path / "metrics.jsonl.replaced") == [5, 6, 7, 1, 2, 3, 4, 5]


def test_a_line_is_on_disk_once_it_is_written(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl", 0)
    file.write({"step": 1, "loss": 2.5})
    assert without_times(tmp_path / "metrics.jsonl") == [{"step": 1, "loss": 2.5}]
    file.close()


def test_a_last_line_cut_short_is_survived(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 3.0}\n{"step": 2, "loss": 2.0}\n{"step": 3, "lo')
    assert steps(path) == [1, 2]
    file = MetricsFile(path, 2)
    file.write({"step": 3, "loss": 1.0})
    file.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3]


def test_a_full_disk_is_named_with_its_file(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl", 0)
    file._file.close()
    file._file = io.TextIOWrapper(io.FileIO("/dev/full", "w"))
    file._file.write("{}")
    with pytest.raises(RunError, match=r"metrics\.jsonl: the disk is full"):
        file.sync()
    with contextlib.suppress(OSError):
        file.close()


def test_damaged_lines_cost_only_themselves(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "metrics.jsonl"
    bad = [b'{"step": 2, "lo\xffss": 2.0', b"\0\0\0", b"[1]", b'{"step": true}', b'{"loss": 1}']
    good = [b'{"step": 1, "loss": 3.0}', b'{"step": 3, "loss": 1.0}']
    path.write_bytes(b"\n".join([good[0], *bad, good[1], b'{"st']))
    assert steps(path) == [1, 3]
    assert "metrics.jsonl: damaged lines are left out" in caplog.text
    MetricsFile(path, 3).close()
    assert "5 damaged lines are moved to metrics.jsonl.damaged" in caplog.text
    assert path.read_bytes() == b"\n".join([*good, b""])
    assert len((tmp_path / "metrics.jsonl.damaged").read_text().splitlines()) == 5
    caplog.clear()
    assert steps(path) == [1, 3] and not caplog.text


RUN = Run(model=TOY, task=TASK, steps=5, batch_sequences=8)


def result(step: int, **numbers: float) -> StepResult:
    return StepResult(step, {"step": step, **numbers}, {})


def test_a_run_leaves_lines_events_and_a_picture(tmp_path: Path) -> None:
    observers = Observers([MetricsWriter(tmp_path, {0: 6e6, 1: 2e6}), LossPlot(tmp_path)])
    run = dataclasses.replace(RUN, batch_stages=((1, 4),))
    observers.notify(Observer.on_start, run, 0)
    for step in range(1, 6):
        observers.notify(Observer.on_step, result(step, loss=5.0 / step, step_s=2.0))
    observers.notify(Observer.on_evaluation, {"step": 5, "loss": 1.5}, {})
    observers.close()
    assert steps(tmp_path / "metrics.jsonl") == [1, 2, 3, 4, 5]
    lines = read_lines(tmp_path / "metrics.jsonl")
    assert [line["model_flops_per_s"] for line in lines] == [3e6, *[1e6] * 4]
    assert lines[0]["share_of_peak"] is None
    assert without_times(tmp_path / "evaluations.jsonl") == [{"step": 5, "loss": 1.5}]
    (events,) = (tmp_path / "events").iterdir()
    assert b"train/loss" in events.read_bytes() and b"validation/loss" in events.read_bytes()
    with Image.open(tmp_path / "loss.png") as picture:
        colours = picture.convert("RGB").getcolors(1 << 20)
    assert len(colours) > 50  # lines, letters and a grid, not an empty page
    assert not list(tmp_path.glob("*.tmp*"))


def test_lines_are_written_every_so_many_steps_and_at_the_end(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path)
    writer.on_start(dataclasses.replace(RUN, log_every=2), 0)
    for step in range(1, 6):
        writer.on_step(result(step, loss=1.0))
    writer.close()
    assert steps(tmp_path / "metrics.jsonl") == [2, 4, 5]


def test_each_skipped_step_has_a_line_that_any_json_reader_takes(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path)
    writer.on_start(dataclasses.replace(RUN, log_every=3), 0)
    for step, loss in ((1, 1.0), (2, math.nan), (3, 1.0)):
        writer.on_step(result(step, loss=loss, loss_bound=math.inf, skipped=float(step == 2)))
    writer.close()
    text = (tmp_path / "metrics.jsonl").read_text()
    lines = [json.loads(line, parse_constant=pytest.fail) for line in text.splitlines()]
    assert [(line["step"], line["loss"], line["loss_bound"]) for line in lines] == [
        (2, None, None), (3, 1.0, None)
    ]  # fmt: skip


def test_an_evaluation_is_json_where_a_perplexity_is_infinite(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path)
    writer.on_start(RUN, 0)
    writer.on_evaluation({"step": 1, "loss": 9.0, "perplexity_per_word": math.inf}, {})
    writer.close()
    [line] = (tmp_path / "evaluations.jsonl").read_text().splitlines()
    assert json.loads(line, parse_constant=pytest.fail)["perplexity_per_word"] is None


def test_a_run_ends_well_where_nothing_can_draw(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    observers = Observers([MetricsWriter(tmp_path), LossPlot(tmp_path)])
    observers.notify(Observer.on_start, RUN, 0)
    observers.notify(Observer.on_step, result(1, loss=5.0))
    observers.close()
    assert "no plot of the loss: a plot needs matplotlib" in caplog.text


def test_what_a_checkpoint_relies_on_is_on_the_disk_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: dict[str, list[float]] = {}
    monkeypatch.setattr(writers, "sync", lambda path: synced.update({path.name: steps(path)}))
    writer = MetricsWriter(tmp_path)
    writer.on_start(RUN, 0)
    writer.on_step(result(1, loss=1.0))
    writer.on_evaluation({"step": 1, "loss": 1.5}, {})
    writer.before_save(1)
    assert synced == {"metrics.jsonl": [1], "evaluations.jsonl": [1]}
    writer.close()


def test_a_run_in_remote_storage_leaves_lines_events_and_a_picture(there: Path) -> None:
    atomic_write(there / "metrics.jsonl", '{"step": 1, "loss": 3.0}\n{"step": 2}\n')
    observers = Observers([MetricsWriter(there), LossPlot(there)])
    observers.notify(Observer.on_start, RUN, 1)
    observers.notify(Observer.on_step, result(2, loss=2.0))
    observers.notify(Observer.before_save, 2)
    assert read_lines(there / "metrics.jsonl")[1]["loss"] == 2.0
    observers.notify(Observer.on_step, result(3, loss=1.0))
    assert steps(there / "metrics.jsonl") == [1, 2]
    observers.close()
    assert steps(there / "metrics.jsonl") == [1, 2, 3]
    (events,) = (there / "events").iterdir()
    assert b"train/loss" in events.read_bytes() and (there / "loss.png").exists()


def test_what_never_started_closes(tmp_path: Path) -> None:
    Observers([MetricsWriter(tmp_path), LossPlot(tmp_path)]).close()
    assert not list(tmp_path.iterdir())


def test_the_error_that_ended_a_run_is_told_where_the_disk_is_full(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    observers = Observers([MetricsWriter(tmp_path), LossPlot(tmp_path)])
    observers.notify(Observer.on_start, RUN, 0)
    observers.notify(Observer.on_step, result(1, loss=5.0))
    (tmp_path / "loss.png").symlink_to("/dev/full")
    with pytest.raises(RunError, match="step 7"), contextlib.ExitStack() as stack:
        stack.callback(observers.close)
        raise RunError("disk full while saving step 7")
    assert "LossPlot: not closed: No space left on device." in caplog.text
