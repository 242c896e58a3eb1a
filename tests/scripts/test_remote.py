"""Runs in remote storage: emulators on this machine, whose requests fail now and then."""

import json
import signal
import time
from pathlib import Path

import pytest

from data.storage.remote import upload
from tests.clouds import Cloud, on_both
from tests.scripts.conftest import Meshloom
from tests.toys import optax_promotion
from tests.trainer.command import WAIT_S, Command, Process, settings, write_text

EVERY = 4
LAST = 12
KILLS = 6
SHORT = [f"Run.checkpoint_every = {EVERY}", f"Run.evaluate_every = {EVERY}"]


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of remote data lie where the test's other files do, also those of its processes."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


@pytest.fixture
def remote(there: Path, tmp_path: Path) -> Command:
    """A text, data and a model directory in the bucket."""
    text = Command.on_new_text(tmp_path).text
    (there / "text.txt").write_bytes(text.read_bytes())
    return Command(there / "run", there / "data", there / "text.txt")


def train(command: Command, steps: int) -> Process:
    return command.train(params=[*SHORT, f"Run.steps = {steps}"])


def kill_after_checkpoint(command: Command, process: Process) -> None:
    """Kills a training that saves a further checkpoint."""
    until, before = time.monotonic() + WAIT_S, command.steps()
    while not command.steps() - before:
        assert time.monotonic() < until
        assert process.popen.poll() is None, process.popen.communicate()
        time.sleep(0.5)
    process.send(signal.SIGKILL)
    process.popen.communicate()


@pytest.mark.long
def test_a_run_is_killed_and_continued(cloud: Cloud, remote: Command, run: Meshloom) -> None:
    cloud.rate = 0.005
    kill_after_checkpoint(remote, train(remote, 5000))
    error = train(remote, LAST).finish()
    assert f"Finished after step {LAST}" in error and "Traceback" not in error
    assert list(remote.losses()) == list(range(1, LAST + 1))
    answer = run("doctor", f"--model_dir={remote.model_dir}", "--data")
    assert answer.code == 0 and "storage of --model_dir" in answer.out, answer.out
    assert cloud.failures, "no request failed"
    assert "gs:" not in [path.name for path in Path.cwd().iterdir()]


@pytest.mark.long
@pytest.mark.parametrize("cloud", ["s3"], indirect=True)
def test_a_run_on_s3_is_continued_and_used(
    cloud: Cloud, there: Path, run: Meshloom, tmp_path: Path
) -> None:
    """Settings, text, data, model, inputs and outputs are there; nothing else is."""
    cloud.rate = 0.005
    write_text(tmp_path / "text.txt")
    upload(tmp_path / "text.txt", there / "text.txt")
    (there / "run.gin").write_text("\n".join([*settings(there / "text.txt"), *SHORT]))
    flags = [f"--model_dir={there / 'run'}", f"--data_dir={there / 'data'}"]
    flags += ["--gin_file=layouts/whole.gin", f"--gin_file={there / 'run.gin'}"]
    with optax_promotion():
        for steps in (EVERY, LAST):
            answer = run("train", *flags, f"--gin_param=Run.steps = {steps}")
            assert answer.code == 0, answer.error
    assert f"Finished after step {LAST}" in answer.error
    use(run, there / "run", there)
    assert cloud.failures, "no request failed"


def use(run: Meshloom, folder: Path, there: Path) -> None:
    """Inspects, evaluates, decodes and reports."""
    model_dir, arrays = f"--model_dir={folder}", there / "arrays.json"
    answer = run("inspect", "checkpoint", model_dir, f"--json={arrays}")
    assert answer.code == 0, answer.error
    assert LAST in json.loads(arrays.read_text())["steps"]

    answer = run("evaluate", model_dir, "--split=validation", f"--json={there / 'loss.json'}")
    assert answer.code == 0, answer.error
    assert json.loads((there / "loss.json").read_text())["step"] == LAST

    prompts, texts = there / "prompts.txt", there / "texts.txt"
    prompts.write_text("kara lost\nmitu\n")
    decode = ["decode", model_dir, f"--input={prompts}", f"--output={texts}", "--max_tokens=3"]
    answer = run(*decode)
    assert answer.code == 0 and len(texts.read_text().splitlines()) == 2, answer.error
    assert "already exists" in run(*decode).error

    answer = run("report", model_dir)
    assert answer.code == 0, answer.error
    assert b"Last step" in (folder / "report.html").read_bytes()
    assert {path.name for path in (folder / "events").iterdir()}


@on_both
@pytest.mark.faults
def test_every_kill_is_survived_and_the_numbers_are_those_of_a_disk(
    cloud: Cloud, remote: Command, tmp_path: Path
) -> None:
    cloud.rate = 0.04
    for _ in range(KILLS):  # most of them during the save
        kill_after_checkpoint(remote, train(remote, 5000))
    last = max(remote.steps()) + 2
    train(remote, last).finish()
    cloud.rate = 0.0
    here = Command.on_new_text(tmp_path)
    train(here, last).finish()
    assert remote.losses() == here.losses()
    assert cloud.failures > 50


@on_both
@pytest.mark.faults
def test_a_second_training_is_refused(remote: Command) -> None:
    first = train(remote, 5000)
    until = time.monotonic() + WAIT_S
    while not (remote.model_dir / "train.lock").exists():
        assert time.monotonic() < until and first.popen.poll() is None
        time.sleep(0.5)
    second = train(remote, 5000)
    assert f"process {first.popen.pid} on" in second.finish(2)
    first.send(signal.SIGTERM)
    first.finish(143)
    assert not (remote.model_dir / "train.lock").exists()
