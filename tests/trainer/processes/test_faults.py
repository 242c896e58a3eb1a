"""Real trainings, and what happens when one of their processes is killed, stopped or stuck.

The short versions run in `make test`, the many of them in `make test-faults`.
"""

import re
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.trainer.command import EVERY, WAIT_S, Command, Process
from trainer.metrics.jsonl import read_lines

LONG = ["Run.steps = 5000"]
LOST_S = 60
STOP_S = 10
STOP_STEPS = 3
INTERRUPT_S = 2


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Command:
    """A text, prepared, and no run."""
    command = Command.on_new_text(tmp_path_factory.mktemp("faults"))
    assert len(command.row_ids(1))
    return command


@pytest.fixture
def started() -> Iterator[list[Process]]:
    """Takes the processes of a test, and leaves none behind."""
    processes: list[Process] = []
    yield processes
    for process in processes:
        process.popen.kill()
        process.popen.communicate()


def newest_step(command: Command) -> int:
    """The last step in metrics.jsonl."""
    lines = read_lines(command.model_dir / "metrics.jsonl")
    return int(lines[-1]["step"]) if lines else 0


def wait_beyond(command: Command, step: int, processes: Sequence[Process]) -> None:
    """Waits until a step beyond this one has ended."""
    until = time.monotonic() + WAIT_S
    while newest_step(command) <= step:
        assert time.monotonic() < until
        assert all(process.popen.poll() is None for process in processes)
        time.sleep(0.05)


def check_preemption(
    command: Command, processes: Sequence[Process], number: signal.Signals, index: int
) -> None:
    """One process gets a signal: all save one step, soon, and end well."""
    before, sent_at = newest_step(command), time.time()
    processes[index].send(number)
    errors = [process.finish(128 + number) for process in processes]
    saved = max(command.steps())
    took_s = (command.model_dir / "checkpoints" / str(saved)).stat().st_mtime - sent_at
    assert saved - before <= STOP_STEPS or took_s < STOP_S
    assert all(f"Stopped after step {saved} of 5000" in error for error in errors)
    assert newest_step(command) == saved


def check_loss(processes: Sequence[Process], index: int) -> None:
    """One process is killed: each other one ends with a line that names it, and without a trace."""
    sent_at = time.monotonic()
    processes[index].send(signal.SIGKILL)
    for process in processes:
        if process is not processes[index]:
            error = process.finish(1)
            assert len(re.findall(f"^meshloom: process {index} on .* is lost", error, re.M)) == 1
            assert "Traceback" not in error and "stack trace" not in error
    processes[index].finish(-signal.SIGKILL)
    assert time.monotonic() - sent_at < LOST_S


def check_interrupt(process: Process, after_s: float) -> None:
    """Ctrl-C ends a process soon, without a traceback; Python listens after some tenths."""
    time.sleep(after_s)
    sent_at = time.monotonic()
    process.send(signal.SIGINT)
    error = process.finish(130)
    assert time.monotonic() - sent_at < INTERRUPT_S
    assert "Traceback" not in error and "KeyboardInterrupt" not in error


@pytest.mark.long
def test_preempted_continued_and_killed(
    prepared: Command, tmp_path: Path, started: list[Process]
) -> None:
    command = prepared.elsewhere(tmp_path / "run")
    started += (first := command.train_on(2, params=LONG))
    wait_beyond(command, 0, first)
    check_preemption(command, first, signal.SIGTERM, 1)

    saved = max(command.steps())
    slices = "Layout.slices = 'data:2'"  # of a device each, as the processes are
    started += (second := command.train_on(2, params=[*LONG, slices]))
    wait_beyond(command, saved, second)
    check_loss(second, 0)


@pytest.mark.parametrize("after_s", [0.7, 2.5])
def test_ctrl_c_while_it_starts(
    prepared: Command, tmp_path: Path, started: list[Process], after_s: float
) -> None:
    started.append(process := prepared.elsewhere(tmp_path / "run").train(params=LONG))
    check_interrupt(process, after_s)


@pytest.mark.faults
@pytest.mark.parametrize("after_ds", range(6, 150, 7))
def test_ctrl_c_at_any_time(
    prepared: Command, tmp_path: Path, started: list[Process], after_ds: int
) -> None:
    started.append(process := prepared.elsewhere(tmp_path / "run").train(params=LONG))
    check_interrupt(process, after_ds / 10)


@pytest.mark.faults
@pytest.mark.parametrize("index", range(4))
def test_four_processes_continue_after_any_is_killed(
    prepared: Command, tmp_path: Path, started: list[Process], index: int
) -> None:
    command = prepared.elsewhere(tmp_path / "run")
    started += (first := command.train_on(4, params=LONG))
    wait_beyond(command, EVERY, first)
    check_loss(first, index)
    last = f"Run.steps = {newest_step(command) + 5}"
    started += (second := command.train_on(4, params=[last]))
    assert all("Finished after step" in process.finish() for process in second)
    assert list(command.losses()) == list(range(1, newest_step(command) + 1))


@pytest.mark.faults
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("index", range(2))
def test_any_signal_to_any_process_stops_all(
    prepared: Command, tmp_path: Path, started: list[Process], number: signal.Signals, index: int
) -> None:
    command = prepared.elsewhere(tmp_path / "run")
    started += (processes := command.train_on(2, params=LONG))
    wait_beyond(command, 0, processes)
    check_preemption(command, processes, number, index)


@pytest.mark.faults
def test_a_signal_during_evaluation_stops_all(tmp_path: Path, started: list[Process]) -> None:
    command = Command.on_new_text(tmp_path)
    validation = tmp_path / "validation.txt"
    validation.write_text(command.text.read_text() * 60)
    params = [*LONG, f"TextFiles.validation = '{validation}'", "Run.evaluate_batches = None",
              "Run.evaluate_every = 4"]  # fmt: skip
    started += (processes := command.train_on(2, params=params))
    wait_beyond(command, 3, processes)
    time.sleep(3)  # the evaluation takes much longer
    assert newest_step(command) == 4
    check_preemption(command, processes, signal.SIGTERM, 1)
    assert command.steps() == {4}
    evaluations = command.model_dir / "evaluations.jsonl"
    assert not read_lines(evaluations)

    short = [*params[1:], "Run.steps = 5", "Run.evaluate_batches = 2"]
    started += (continued := command.train_on(2, params=short))
    assert all("Finished after step 5" in process.finish() for process in continued)
    assert [line["step"] for line in read_lines(evaluations)] == [4, 5]


@pytest.mark.faults
def test_ctrl_c_in_one_process_stops_all(
    prepared: Command, tmp_path: Path, started: list[Process]
) -> None:
    command = prepared.elsewhere(tmp_path / "run")
    started += (processes := command.train_on(2, params=LONG))
    wait_beyond(command, 0, processes)
    processes[1].send(signal.SIGINT)
    assert all("Stopped after step" in process.finish(130) for process in processes)


@pytest.mark.faults
def test_a_stall_ends_all_and_names_who_is_behind(
    prepared: Command, tmp_path: Path, started: list[Process]
) -> None:
    command = prepared.elsewhere(tmp_path / "run")
    params = [*LONG, "Run.stall_minutes = 0.5"]
    started += (processes := command.train_on(2, params=params))
    wait_beyond(command, 5, processes)
    processes[1].send(signal.SIGSTOP)
    error = processes[0].finish(75)
    assert "Thread 0x" in error
    assert re.search("Run.stall_minutes: process 1 did not answer; the others are at", error)
    processes[1].send(signal.SIGCONT)
    processes[1].finish(75)
