"""`meshloom doctor` on what is really broken."""

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from configs.json_reader import sign
from scripts.commands.doctor import machine
from tests.scripts.conftest import Meshloom, Place
from tests.toys import ROOT
from trainer.checkpoints.manager import Checkpoints
from trainer.device_check import Comparison
from trainer.processes.training_lock import Holder

Lines = dict[str, dict[str, Any]]


@pytest.fixture
def broken(trained: Place, tmp_path: Path) -> Place:
    """A copy of the trained model and its data, to break."""
    shutil.copytree(trained.folder / "run", tmp_path / "run")
    shutil.copytree(trained.folder / "data", tmp_path / "data")
    return Place(tmp_path, trained.text)


def examine(run: Meshloom, place: Place, *flags: str, code: int) -> Lines:
    """The findings that are not ok, by check."""
    file = place.folder / "doctor.json"
    answer = run("doctor", place.model_dir, f"--data_dir={place.folder / 'data'}", "--data",
                 f"--json={file}", *flags)  # fmt: skip
    assert answer.code == code, answer
    findings = json.loads(file.read_text())
    assert len([text for text in answer.out.splitlines() if text[0] != " "]) == len(findings)
    problems = {line["check"]: line for line in findings if line["status"] != "ok"}
    assert all(line["fix"] in answer.out for line in problems.values())
    return {check: line for check, line in problems.items()
            if not check.startswith(("memory", "disk of --model"))}  # fmt: skip


def test_nothing_is_wrong_and_nothing_is_left(run: Meshloom, broken: Place) -> None:
    before = {path for path in broken.folder.rglob("*")}
    assert examine(run, broken, code=0) == {}
    findings = json.loads((broken.folder / "doctor.json").read_text())
    assert "steps 2, 4 are complete, all arrays read" in [line["text"] for line in findings]
    assert {path for path in broken.folder.rglob("*")} - before == {broken.folder / "doctor.json"}


def test_a_truncated_checkpoint(run: Meshloom, broken: Place) -> None:
    [file, *_] = (broken.folder / "run/checkpoints/4").rglob("d/*")
    file.write_bytes(file.read_bytes()[:-1])
    problem = examine(run, broken, code=1)["checkpoints"]
    assert problem["text"].startswith("step 4 is damaged: ")
    subprocess.run(problem["fix"].split(), check=True)
    assert examine(run, broken, code=0) == {}


def test_a_renamed_checkpoint(run: Meshloom, broken: Place) -> None:
    folder = broken.folder / "run/checkpoints"
    (folder / "4").rename(folder / "9")
    problem = examine(run, broken, code=1)["checkpoints"]
    assert problem["text"].startswith("step 9 is damaged: it is step 4: rename its folder to 4")
    (folder / "9").rename(folder / "4")
    assert examine(run, broken, code=0) == {}


def test_a_training_that_is_under_way(
    run: Meshloom, broken: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, damage = broken.folder / "run/train.lock", Checkpoints.damage

    def removed_first(checkpoints: Checkpoints, step: int, **flags: bool) -> str | None:
        shutil.rmtree(checkpoints.folder / "2", ignore_errors=True)  # as the training does
        return damage(checkpoints, step, **flags)

    monkeypatch.setattr(Checkpoints, "damage", removed_first)
    for pid, state in ((os.getppid(), "trains there"), (1 << 30, "has ended without unlocking")):
        lock.write_text(Holder(pid, socket.gethostname(), "today").dump())
        assert examine(run, broken, code=0) == {}
        findings = json.loads((broken.folder / "doctor.json").read_text())
        texts = {line["check"]: line["text"] for line in findings}
        assert texts["lock"] == f"process {pid} on {socket.gethostname()}, since today, {state}"
        assert texts["checkpoints"] == "steps 4 are complete, all arrays read"


def test_a_deleted_file_of_the_cache_and_no_cache(run: Meshloom, broken: Place) -> None:
    (broken.folder / "data/toy/train.targets.npy").unlink()
    problem = examine(run, broken, code=1)["data of toy"]
    assert problem["status"] == "error" and "train.targets.npy" in problem["text"]
    meshloom, command, *flags = problem["fix"].split()
    assert meshloom == "meshloom" and run(command, *flags).code == 0
    assert examine(run, broken, code=0) == {}

    shutil.rmtree(broken.folder / "data/toy")
    assert examine(run, broken, code=0)["data of toy"]["status"] == "warning"


def test_every_cache_of_a_folder_without_settings(run: Meshloom, broken: Place) -> None:
    manifest = broken.folder / "data/toy/manifest.json"
    manifest.write_text(json.dumps(sign({"format": 9})))
    answer = run("doctor", f"--data_dir={broken.folder / 'data'}")
    assert answer.code == 1 and "is a cache of another version" in answer.out, answer.error
    manifest.unlink()
    answer = run("doctor", f"--data_dir={broken.folder / 'data'}")
    assert answer.code == 1 and "error    data of toy: " in answer.out


def test_a_flipped_bit(run: Meshloom, broken: Place) -> None:
    folder = broken.folder / "data/toy"
    rows = np.load(folder / "train.targets.npy", mmap_mode="r+")
    rows[-1, 0] ^= 1
    rows.flush()
    assert "rows 0 to " in examine(run, broken, code=1)["data of toy"]["text"]
    data = f"--data_dir={folder.parent}"
    assert run("doctor", data).code == 0 and run("doctor", data, "--data").code == 1


def test_a_vocabulary_of_another_run(run: Meshloom, broken: Place) -> None:
    other = [f"--data_dir={broken.folder / 'other'}", "--gin_param=SentencePiece.size = 280"]
    place = [*broken.flags()[1:], *other]
    assert run("prepare", *place).code == 0
    shutil.copy(broken.folder / "other/toy/vocab.model", broken.folder / "run/vocab.model")
    assert examine(run, broken, code=1).keys() == {"vocabulary"}


def test_settings_and_metrics_that_cannot_be_read(run: Meshloom, broken: Place) -> None:
    with (broken.folder / "run/metrics.jsonl").open("a") as file:
        file.write("\0\0\0\n")
    assert examine(run, broken, code=0)["metrics"]["status"] == "warning"
    (broken.folder / "run/config.gin").write_text("Run.steps = \n")
    assert examine(run, broken, code=1)["settings"]["status"] == "error"
    (broken.folder / "run/config.gin").unlink()
    assert examine(run, broken, code=1)["settings"]["fix"] == "It had one: copy config.gin back."


def test_a_folder_that_cannot_be_written(run: Meshloom) -> None:
    answer = run("doctor", "--data_dir=/proc/meshloom")  # refuses even root
    assert answer.code == 1
    assert "error    disk of --data_dir: /proc cannot be written" in answer.out


def test_other_object_storage_is_refused(run: Meshloom) -> None:
    answer = run("doctor", "--model_dir=az://bucket/run")
    assert answer.code == 2 and "az:// is not supported" in answer.error
    assert not Path("s3:").exists()


def test_a_package_that_is_missing_or_too_old() -> None:
    assert machine.unmet("jax>=0.10") is None
    assert "is installed, >=999.1 is required" in str(machine.unmet("jax>=999.1"))
    assert machine.unmet("no-such-package") == "no-such-package is not installed"


def test_a_port_that_is_in_use(tmp_path: Path) -> None:
    with socket.create_server(("", 0)) as server:
        address = f"localhost:{server.getsockname()[1]}"
        done = subprocess.run(
            [sys.executable, "-m", "scripts.meshloom", "doctor", f"--data_dir={tmp_path}",
             f"--coordinator_address={address}", "--process_count=2", "--process_index=0"],
            cwd=ROOT, text=True, capture_output=True,
        )  # fmt: skip
    assert done.returncode == 1
    assert f"error    processes: process 0 cannot listen at {address}" in done.stdout
    assert "ok       devices" in done.stdout


def test_gradients_of_devices_are_lines_of_their_models(
    run: Meshloom, trained: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = [
        Comparison("dense", "all devices", 3e-7, "embed_VD"),
        Comparison("dense", "all devices, 4 microbatches", 0.5, "embed_VD"),
        Comparison("experts", "all devices", refusal="Layout.rules: no.  Mend it."),
        Comparison("encoder-decoder", "all devices", 2e-6, "embed_VD"),
    ]
    layouts = []
    monkeypatch.setattr(
        machine, "compare_with_cpu", lambda layout: [layouts.append(layout), *results][1:]
    )
    (tmp_path / "mine.gin").write_text("Layout.mesh = 'rows:1'\nLayout.rules = 'batch:rows'\n")
    answer = run("doctor", "--devices", f"--gin_file={tmp_path / 'mine.gin'}",
                 f"--data_dir={trained.folder / 'data'}")  # fmt: skip
    assert answer.code == 1 and [layout.mesh for layout in layouts] == ["rows:1"]
    lines = [line for line in answer.out.splitlines() if "gradients, " in line]
    assert [line.split(maxsplit=1)[0] for line in lines] == ["error", "ok", "warning", "ok"]
    assert (
        "4 microbatches: the gradient of embed_VD differs from a CPU's by 0.5 of its largest"
        in lines[0]
    )
    assert "3e-07 on all devices" in lines[1] and "Layout.rules: no." in lines[2]
    assert not [line for line in answer.out.splitlines() if line.startswith("error    data")]
