"""What a run sends to services: by fakes of their packages; the real ones were tried by hand:
wandb 0.31 (offline) and mlflow 3.17 (files); a run, its continuation, no server, no key.
"""

import importlib.util
import struct
import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tensorboardX.proto import event_pb2

from configs.errors import UserError
from configs.write import values
from docs.examples.mlflow_tracker import MLflow
from tests.trainer.metrics.test_writers import RUN, result
from trainer.metrics import trackers
from trainer.metrics.jsonl import read_lines
from trainer.metrics.trackers import (
    Background,
    EventFiles,
    TensorBoard,
    TrackedRun,
    Tracker,
    TrackerSpec,
    WandB,
)
from trainer.metrics.writers import MetricsWriter
from trainer.observers import Outcome
from trainer.run import Run


class Service:
    """Keeps what it is sent, by run, as both services do."""

    def __init__(self) -> None:
        self.runs: dict[str, dict[int, dict[str, float]]] = {}
        self.settings: dict[str, dict[str, Any]] = {}
        self.ends: list[Any] = []

    def add(self, run: str, step: int, name: str, number: float) -> None:
        self.runs[run].setdefault(step, {})[name] = number


def run_with(*specs: TrackerSpec) -> Run:
    return Run(model=RUN.model, task=RUN.task, steps=5, batch_sequences=8, trackers=specs)


def train(run: Run, folder: Path, *, steps: range, ends: bool = True) -> None:
    writer = MetricsWriter(folder, settings=values([run]))
    writer.on_start(run, steps[0] - 1)
    for step in steps:
        writer.on_step(result(step, loss=5.0 / step))
    writer.on_evaluation({"step": steps[-1], "loss": 1.5, "bleu": None}, {})
    writer.before_save(steps[-1])
    if ends:
        writer.on_end(Outcome(steps[-1]))
    writer.close()


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> Service:
    service = Service()

    class FakeRun:
        def __init__(self, id: str, config: dict[str, Any], **_: Any):
            service.settings.setdefault(id, config)
            self.id, self.step = id, max(service.runs.setdefault(id, {}), default=-1) + 1

        def log(self, numbers: dict[str, float], step: int) -> None:
            self.step = step
            for name, number in numbers.items():
                assert name not in service.runs[self.id].get(step, {}), "sent twice"
                service.add(self.id, step, name, number)

        def finish(self, exit_code: int) -> None:
            service.ends.append(exit_code)

    def init(**given: Any) -> FakeRun:
        assert given["resume"] == "allow" and given["project"] == "demo"
        return FakeRun(**given)

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    return service


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> Service:
    service = Service()

    class Client:
        def __init__(self, tracking_uri: str | None):
            assert tracking_uri == "sqlite:///x.db"

        def get_experiment_by_name(self, name: str) -> None:
            return None

        def create_experiment(self, name: str) -> str:
            return "7"

        def create_run(self, experiment_id: str, run_name: str) -> Any:
            service.runs[run_name] = {}
            return types.SimpleNamespace(info=types.SimpleNamespace(run_id=run_name))

        def log_batch(self, run: str, metrics: Any = (), params: Any = ()) -> None:
            service.settings.setdefault(run, {}).update(params)
            for name, number, _, step in metrics:
                assert name not in service.runs[run].get(step, {}), "sent twice"
                service.add(run, step, name, number)

        def get_metric_history(self, run: str, name: str) -> list[Any]:
            steps = [step for step, numbers in service.runs[run].items() if name in numbers]
            return [types.SimpleNamespace(step=step) for step in steps]

        def update_run(self, run: str, status: str) -> None:
            service.ends.append(status)

        def set_terminated(self, run: str, status: str) -> None:
            service.ends.append(status)

    entities = types.SimpleNamespace(Metric=lambda *x: x, Param=lambda *x: x)
    monkeypatch.setitem(sys.modules, "mlflow", types.SimpleNamespace(MlflowClient=Client))
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    return service


def test_a_run_and_its_continuation_are_one_run_there(
    tmp_path: Path, wandb: Service, mlflow: Service
) -> None:
    run = run_with(WandB(project="demo"), MLflow(tracking_uri="sqlite:///x.db", name="mine"))
    train(run, tmp_path, steps=range(1, 5), ends=False)
    train(run, tmp_path, steps=range(4, 6))  # from the checkpoint of step 3
    for service in (wandb, mlflow):
        [numbers] = service.runs.values()
        [settings] = service.settings.values()
        assert {step: one["train/loss"] for step, one in numbers.items()} == {
            line["step"]: line["loss"] for line in read_lines(tmp_path / "metrics.jsonl")
        }
        assert numbers[5] == {"train/loss": 1.0, "validation/loss": 1.5}
        assert settings["Run.model"] == "@Transformer()"
    assert settings["Run.steps"] == "5" and wandb.ends == [1, 0]
    assert mlflow.ends == ["FAILED", "RUNNING", "FINISHED"]
    assert not (tmp_path / "events").exists()


@pytest.mark.parametrize(("first_step", "hidden"), [(0, []), (3, [4])])
def test_a_continuation_hides_the_events_behind_its_checkpoint(
    tmp_path: Path, first_step: int, hidden: list[int]
) -> None:
    EventFiles(TrackedRun(tmp_path, "mine", first_step, {})).close(succeeded=True)
    (file,) = (tmp_path / "events").iterdir()
    starts = [event for event in events_of(file.read_bytes()) if event.HasField("session_log")]
    assert [event.step for event in starts] == hidden


def events_of(content: bytes) -> Iterator[Any]:
    """Reads the records of an event file: a length, 4 bytes, an event, 4 bytes."""
    while content:
        (size,) = struct.unpack("<Q", content[:8])
        yield event_pb2.Event.FromString(content[12 : 12 + size])
        content = content[16 + size :]


def test_the_default_is_tensorboard() -> None:
    assert RUN.trackers == (TensorBoard(),)


def test_a_failing_service_is_one_warning(
    tmp_path: Path, wandb: Service, caplog: pytest.LogCaptureFixture
) -> None:
    train(run_with(WandB(project="another")), tmp_path, steps=range(1, 5))  # init refuses it
    assert [line["step"] for line in read_lines(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4]
    [record] = caplog.records
    assert "WandB: AssertionError" in record.message and "metrics.jsonl" in record.message


def test_a_service_that_hangs_does_not_keep_the_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(trackers, "CLOSE_S", 0.05)
    answers = threading.Event()

    def connect() -> Tracker:
        answers.wait()
        raise ConnectionError

    tracker = Background("MLflow", connect)
    tracker.log(1, {"train/loss": 2.0})
    tracker.close(succeeded=True)
    assert "MLflow: no answer within" in caplog.text
    answers.set()
    tracker._thread.join()


def test_a_missing_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    TensorBoard().check()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"@WandB\(\) needs the package wandb.*pip install wandb"):
        WandB().check()
