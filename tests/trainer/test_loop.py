"""The loop trains by itself; observers are called as things happen."""

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path

import jax
import numpy as np
import pytest

from configs.errors import RunError
from layouts.mesh import make_mesh
from models.api import Params
from tests.toys import TOY, WHOLE, row_ids
from tests.trainer.bigram import LENGTH, VOCAB, text_rows
from tests.trainer.planning.runs import TASK
from trainer.checkpoints.manager import Checkpoints
from trainer.evaluate import Part, Progress
from trainer.interrupts import Diverged
from trainer.loop import TrainJob, train
from trainer.observers import CompiledStep, Line, Observer, Outcome, StepResult
from trainer.optimizers.adamw import AdamW
from trainer.optimizers.schedules import Constant
from trainer.resume.history import Start, record_start, time_now
from trainer.run import Run
from trainer.step import abstract_params, evaluate_step, init_state, train_step_spec

MODEL = dataclasses.replace(TOY, vocab=VOCAB, length=LENGTH)
RUN = Run(
    model=MODEL, task=TASK, steps=5, batch_sequences=4, checkpoint_every=2, evaluate_every=4,
    optimizer=AdamW(schedule=Constant()),
)  # fmt: skip


def job(model_dir: Path, run: Run = RUN) -> TrainJob:
    splits = {"train": text_rows(12), "validation": text_rows(4, seed=1)}
    return TrainJob(run, WHOLE, make_mesh(WHOLE), splits, model_dir)


class Recorder(Observer):
    """Keeps the names of calls in their order, and the losses."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.losses: dict[int, float] = {}

    def on_start(self, run: Run, first_step: int) -> None:
        self.calls.append(f"start {first_step}")

    def on_compiled(self, compiled: CompiledStep) -> None:
        self.calls.append("compiled")

    def on_step(self, result: StepResult) -> None:
        self.calls.append(f"step {result.step}")
        loss = result.line["loss"]
        assert loss is not None
        self.losses[result.step] = loss

    def evaluate(self, step: int, params: Params, progress: Progress) -> Mapping[str, float]:
        self.calls.append(f"evaluate {step}")
        return {"bleu": -float(step)}

    def on_evaluation(self, line: Line, parts: Mapping[str, Part]) -> None:
        self.calls.append(f"evaluation {line['step']}")
        assert line["bleu"] == -(line["step"] or 0)

    def before_save(self, step: int) -> None:
        self.calls.append(f"save {step}")

    def on_end(self, outcome: Outcome) -> None:
        self.calls.append(f"end {outcome.steps}")

    def close(self) -> None:
        self.calls.append("close")


def weights(model_dir: Path, step: int) -> dict[str, np.ndarray]:
    with Checkpoints(model_dir) as checkpoints:
        params = checkpoints.restore_params(
            abstract_params(MODEL.model(WHOLE), make_mesh(WHOLE)), step
        )
    leaves, _ = jax.tree.flatten_with_path(params)
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


@functools.cache
def recorded(model_dir: Path) -> Recorder:
    recorder = Recorder()
    train(job(model_dir), [recorder])
    return recorder


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run")


def test_observers_are_called_as_things_happen(model_dir: Path) -> None:
    calls = recorded(model_dir).calls
    assert calls == [
        "start 0", "compiled", "step 1", "step 2", "save 2", "step 3", "step 4", "evaluate 4",
        "evaluation 4", "save 4", "step 5", "evaluate 5", "evaluation 5", "save 5", "end 5",
        "close",
    ]  # fmt: skip


def test_a_run_resumes_bit_for_bit_between_stages_of_its_batch(
    model_dir: Path, tmp_path: Path
) -> None:
    """The batch of 4 rows has 8 after step 2 and 2 after step 4; the run stops after step 3."""
    run = dataclasses.replace(RUN, batch_stages=((2, 8), (4, 2)), checkpoint_every=3)
    whole, first, second = Recorder(), Recorder(), Recorder()
    train(job(tmp_path / "whole", run), [whole])
    train(job(tmp_path / "parts", dataclasses.replace(run, steps=3)), [first])
    train(job(tmp_path / "parts", run), [second])
    assert [call for call in whole.calls if call == "compiled" or call.startswith("step")] == [
        "compiled", "step 1", "step 2", "compiled", "step 3", "step 4", "compiled", "step 5",
    ]  # fmt: skip
    assert first.losses | second.losses == whole.losses
    assert [whole.losses[step] == recorded(model_dir).losses[step] for step in (1, 2, 3)] == [
        True, True, False,
    ]  # fmt: skip
    for name, array in weights(tmp_path / "whole", 5).items():
        np.testing.assert_array_equal(array, weights(tmp_path / "parts", 5)[name])


def test_a_run_resumes_bit_for_bit_between_lengths_of_its_rows(tmp_path: Path) -> None:
    """Rows of 24 tokens are read as three of 8, after step 2 as two of 12, after step 4 whole."""
    run = dataclasses.replace(RUN, length_stages=((0, 8), (2, 12), (4, 24)), checkpoint_every=3)
    whole, first, second = Recorder(), Recorder(), Recorder()
    train(job(tmp_path / "whole", run), [whole])
    train(job(tmp_path / "parts", dataclasses.replace(run, steps=3)), [first])
    train(job(tmp_path / "parts", run), [second])
    assert whole.calls.count("compiled") == 3 and second.calls.count("compiled") == 2
    assert first.losses | second.losses == whole.losses
    for name, array in weights(tmp_path / "whole", 5).items():
        np.testing.assert_array_equal(array, weights(tmp_path / "parts", 5)[name])
    # The first loss is that of the same tokens in a cache of short rows.
    rows, step_spec = text_rows(12), train_step_spec(RUN, WHOLE)
    arrays = {name: np.asarray(array).reshape(-1, 8) for name, array in rows.arrays.items()}
    ids = (row_ids(RUN.seed, 0, 4, 12)[:, None] * 3 + np.arange(3)).reshape(-1)
    batch = dataclasses.replace(rows, arrays=arrays).batch(ids)
    state = init_state(step_spec, make_mesh(WHOLE))
    with jax.set_mesh(make_mesh(WHOLE)):
        sums = evaluate_step(step_spec.model, RUN.criterion, state["params"], batch)
    assert whole.losses[1] == pytest.approx(float(sums.loss / sums.tokens), rel=1e-5)


def test_training_without_observers_is_the_same(model_dir: Path, tmp_path: Path) -> None:
    recorded(model_dir)
    outcome = train(job(tmp_path))
    assert (outcome.steps, outcome.stop_signal) == (5, None)
    assert outcome.step_s is not None and 0 <= outcome.data_stall_fraction <= 1
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoints"]
    first, second = weights(model_dir, 5), weights(tmp_path, 5)
    assert first.keys() == second.keys()
    for name, array in first.items():
        np.testing.assert_array_equal(array, second[name])


def test_a_finished_run_compiles_nothing(model_dir: Path) -> None:
    recorded(model_dir)
    again = Recorder()
    outcome = train(job(model_dir), [again])
    assert outcome == Outcome(5)
    assert again.calls == ["start 5", "end 5", "close"]


def test_a_longer_run_goes_on_from_the_newest_checkpoint(
    model_dir: Path, log_lines: list[str]
) -> None:
    recorded(model_dir)
    more = Recorder()
    train(job(model_dir, dataclasses.replace(RUN, steps=6)), [more])
    assert "Resuming from step 5." in log_lines
    assert [*more.losses] == [6] and more.calls[0] == "start 5"


def test_a_cpu_has_written_a_checkpoint_before_the_next_step(tmp_path: Path) -> None:
    """While it is written, the next step would need another state in memory."""

    class Watcher(Observer):
        saved: dict[int, int | None] = {}  # noqa: RUF012

        def before_step(self, step: int) -> None:
            self.saved[step] = Checkpoints(tmp_path).latest

    train(job(tmp_path), [Watcher()])
    assert Watcher.saved == {1: None, 2: None, 3: 2, 4: 2, 5: 4}


@pytest.mark.parametrize("steps", [2, 5])
def test_weights_that_are_not_finite_are_not_saved(tmp_path: Path, steps: int) -> None:
    """The loss of a step is that of the weights before its update."""
    rate = Constant(peak=3e38, warmup_steps=1)
    run = dataclasses.replace(
        RUN, steps=steps, checkpoint_every=1, evaluate_every=1,
        optimizer=AdamW(schedule=rate, weight_decay=1e30),
    )  # fmt: skip
    with pytest.raises(Diverged, match="Weights are NaN or infinite after step 1,") as error:
        train(job(tmp_path, run))
    assert str(error.value).endswith("Last good checkpoint: none was saved yet.")
    assert Checkpoints(tmp_path).steps() == []


def test_a_finished_run_leaves_no_local_checkpoint(tmp_path: Path) -> None:
    run = dataclasses.replace(RUN, local_checkpoint_every=1, checkpoint_every=5)
    local = tmp_path / "local"
    record_start(tmp_path / "run", Start(0, time_now()))
    train(dataclasses.replace(job(tmp_path / "run", run), local_dir=local))
    assert local.exists() and not list(local.iterdir())


def test_observers_are_closed_where_the_loss_is_not_finite(tmp_path: Path) -> None:
    absurd = dataclasses.replace(
        RUN, optimizer=AdamW(schedule=Constant(peak=1e38), clip_global_norm=None)
    )
    recorder = Recorder()
    with pytest.raises(RunError, match=r"is (nan|inf)"):
        train(job(tmp_path, absurd), [recorder])
    assert recorder.calls[-1] == "close" and "end" not in " ".join(recorder.calls)
    assert max(recorder.losses) < 5
