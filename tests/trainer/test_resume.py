"""A run that is killed or stopped, and started again, is the run that was never disturbed.

So is one of several processes.
"""

import dataclasses
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.launch_local import free_port
from tests.toys import ROOT, ROUND_OFF
from tests.trainer.command import EVERY, STEPS, Command, Process
from trainer.metrics.jsonl import read_lines
from trainer.processes.training_lock import lock

FEW_STEPS = 20


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Command:
    """A run of the command line from start to end, on one device, never disturbed."""
    command = Command.on_new_text(tmp_path_factory.mktemp("straight"), float64=True)
    command.train().finish()
    return command


@pytest.fixture(scope="module")
def killed(straight: Command, tmp_path_factory: pytest.TempPathFactory) -> Command:
    """A run that was killed without warning, some steps after a checkpoint."""
    command = straight.elsewhere(tmp_path_factory.mktemp("killed") / "run")
    process = command.train()
    process.wait_for_step(2 * EVERY)
    process.send(signal.SIGKILL)
    process.finish(-signal.SIGKILL)
    return command


def newest(command: Command) -> int:
    return max(int(p.name) for p in command.model_dir.glob("checkpoints/*") if p.name.isdecimal())


def test_killed_restarted_terminated_and_continued_is_undisturbed(
    killed: Command, straight: Command, tmp_path: Path
) -> None:
    expected = straight.losses()
    assert list(expected) == list(range(1, STEPS + 1))
    assert len(set(expected.values())) > STEPS * 0.9  # each step has a loss of its own
    command = killed.copied_to(tmp_path / "run")
    saved = newest(command)
    assert 2 * EVERY <= saved <= max(command.losses()) < STEPS  # it was in the middle

    restarted = command.train(ignores="HUP")  # as under nohup
    restarted.wait_for_step(saved + EVERY)
    restarted.send(signal.SIGHUP)
    restarted.send(signal.SIGTERM)
    said = restarted.finish(143)
    stopped = newest(command)
    assert f"Resuming from step {saved}." in said and "its lock is taken over" in said
    assert f"Stopped after step {stopped} of {STEPS}" in said and stopped < STEPS
    assert command.losses() == {step: expected[step] for step in range(1, stopped + 1)}

    said = command.train().finish()
    assert f"Resuming from step {stopped}." in said and "Finished" in said
    assert list(command.losses().items()) == list(expected.items())
    ends = [read_lines(c.model_dir / "evaluations.jsonl")[-1] for c in (command, straight)]
    assert [end.pop("wall_time") < time.time() for end in ends] == [True, True]
    assert ends[0] == ends[1]


def test_restart_under_another_layout_and_mesh_is_equal_to_round_off(
    killed: Command, straight: Command, tmp_path: Path
) -> None:
    command = killed.copied_to(tmp_path / "run")
    before, expected = newest(command), straight.losses()
    said = command.train(layout="fsdp", devices=4).finish()
    assert f"Resuming from step {before}." in said
    computed = command.losses()
    assert list(computed) == list(expected)
    steps = range(1, before + 1)
    assert [computed[step] for step in steps] == [expected[step] for step in steps]
    np.testing.assert_allclose([*computed.values()], [*expected.values()], rtol=ROUND_OFF)
    assert computed != expected  # it was computed again, in another order


@pytest.mark.long
def test_the_printed_command_continues_a_run_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pasted, it brings back layout, devices and data directory, from another folder as well."""
    made = Command.on_new_text(tmp_path)
    undisturbed = dataclasses.replace(made, data_dir=tmp_path / "its data")
    undisturbed.train(layout="fsdp", devices=2).finish()
    command = undisturbed.elsewhere(tmp_path / "a run")
    process = command.train(layout="fsdp", devices=2)
    process.wait_for_step(EVERY)
    process.send(signal.SIGTERM)
    said = process.finish(143)
    name, *arguments = shlex.split(said.partition("Resume with: ")[2].splitlines()[0])
    assert name == "meshloom" and newest(command) < STEPS
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".cache"))
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    subprocess.run([sys.executable, "-m", "scripts.meshloom", *arguments], cwd=tmp_path, check=True)
    assert list(command.losses().items()) == list(undisturbed.losses().items())


def test_a_second_training_in_a_model_directory_is_refused(straight: Command) -> None:
    with lock(straight.model_dir):
        error = straight.train().finish(2)
    assert f"another training is under way there: process {os.getpid()} on " in error
    assert "Traceback" not in error


def test_no_row_is_skipped_or_repeated_over_a_restart(straight: Command) -> None:
    """The rows of a step follow from the step: an epoch's batches are all rows, each once."""
    rows = np.concatenate([straight.row_ids(step) for step in range(1, STEPS + 1)])
    count = rows.max() + 1
    assert len(rows) > 2 * count
    for start in range(0, len(rows) - count, count):
        assert sorted(rows[start : start + count]) == list(range(count))


def test_a_loss_that_is_no_number_ends_the_run(straight: Command, tmp_path: Path) -> None:
    command = dataclasses.replace(straight.elsewhere(tmp_path / "run"), float64=False)
    absurd = ["Constant.peak = 1e38", "Constant.warmup_steps = 1", "Run.checkpoint_every = 1"]
    said = command.train(params=absurd).finish(1)
    assert "The loss of step 2 is nan." in said
    assert f"Rows of that batch: {', '.join(map(str, command.row_ids(2)))}." in said
    assert "Last good checkpoint: step 1." in said
    assert "Traceback" not in said
    assert list(command.losses()) == [1] and newest(command) == 1


@pytest.mark.long
def test_two_processes_train_like_one(straight: Command, tmp_path: Path) -> None:
    """Four devices, two in each process, under data and model parallelism."""
    command, port = straight.elsewhere(tmp_path / "run"), free_port()

    def start(index: int) -> Process:
        return command.train(
            f"--coordinator_address=localhost:{port}",
            "--process_count=2",
            f"--process_index={index}",
            layout="data_and_model_parallel",
            devices=2,
            params=[f"Run.steps = {FEW_STEPS}", "Run.checkpoint_every = 10"],
        )

    processes = [start(0), start(1)]
    try:
        said = [process.finish() for process in processes]
    finally:
        for process in processes:
            process.popen.kill()
    assert all(f"Finished after step {FEW_STEPS}" in text for text in said)
    computed, expected = command.losses(), straight.losses()
    assert list(computed) == list(range(1, FEW_STEPS + 1))
    np.testing.assert_allclose(
        [*computed.values()], [expected[step] for step in computed], rtol=ROUND_OFF
    )
    assert {path.name for path in command.model_dir.glob("checkpoints/*")} == {"10", "20"}
