"""Commands on two processes: the files of one process, and nothing written twice."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.launch_local import free_port
from tests.scripts.conftest import Place
from tests.toys import ROOT
from tests.trainer.command import write_text
from trainer.metrics.jsonl import read_lines

WAIT_S = 300
# Commands one after the other in the same processes, which join once.
PROGRAM = """
import json, sys
from scripts import cli, devices, exits
commands, flags = map(json.loads, sys.argv[1:])
def call():
    devices.start_devices(devices.ProcessFlags(**flags))
    devices.start_devices = lambda *_: None
    for arguments in commands:
        cli.cli.main(arguments, standalone_mode=False)
exits.exits(call)
"""
End = tuple[int, str, str]
Process = "subprocess.Popen[str]"


def start(
    commands: Sequence[Sequence[str]],
    index: int = 0,
    count: int = 1,
    port: int = 0,
    cwd: Path = ROOT,
) -> Process:
    """Starts a process that makes some commands, on its share of two devices."""
    place = {
        "coordinator_address": f"localhost:{port}",
        "process_count": count,
        "process_index": index,
    }
    flags = {"simulate_devices": 2 // count, **(place if count > 1 else {})}
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".cache"),
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    }
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, json.dumps(commands), json.dumps(flags)],
        cwd=cwd, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def start_two(
    *commands: Sequence[Sequence[str]], cwds: Sequence[Path] = (ROOT, ROOT)
) -> list[Process]:
    """Starts two processes of one run, each with commands of its own."""
    port = free_port()
    return [start(commands[index], index, 2, port, cwds[index]) for index in range(2)]


def ends(processes: Sequence[Process]) -> list[End]:
    """Waits for processes; their exit codes, outputs and errors."""
    texts = [process.communicate(timeout=WAIT_S) for process in processes]
    return [(p.returncode, *text) for p, text in zip(processes, texts, strict=True)]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    folder = tmp_path_factory.mktemp("processes")
    (folder / "in.txt").write_text("kara lost nevo\nmitu\nlost mi\n")
    return Place(folder, write_text(folder / "text.txt"))


def settings_of(place: Place) -> list[str]:
    return [flag for flag in place.flags() if flag.startswith("--gin_param")]


def data_commands(place: Place, output: Path, data_dir: Path) -> list[list[str]]:
    """The commands that prepare or read a task."""
    data, layout = f"--data_dir={data_dir}", "--gin_file=layouts/data_parallel.gin"
    return [
        ["prepare", data, *settings_of(place)],
        ["train", f"--model_dir={output / 'run'}", data, layout, *settings_of(place)],
        ["evaluate", place.model_dir, data, layout, f"--json={output / 'evaluate.json'}"],
    ]


def text_commands(place: Place, output: Path) -> list[list[str]]:
    """The commands that read a text."""
    text = [place.model_dir, "--gin_file=layouts/data_parallel.gin",
            f"--input={place.folder / 'in.txt'}"]  # fmt: skip
    return [
        ["decode", *text, "--max_tokens=5", f"--output={output / 'decode.txt'}"],
        ["score", *text],
    ]


def contents(folder: Path) -> dict[str, bytes]:
    """The content of each file that a command wrote, but for times."""
    names = ("evaluate.json", "decode.txt", "decode.txt.made", "run/config.gin")
    return {name: (folder / name).read_bytes() for name in names if (folder / name).exists()}


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in read_lines(folder / "run/metrics.jsonl")]


def test_two_processes_write_what_one_does(place: Place) -> None:
    one, shared, separate = (place.folder / name for name in ("one", "shared", "separate"))
    for folder in (one, shared, separate):
        folder.mkdir()
    train = ["train", place.model_dir, *place.flags(layout="data_parallel")]
    of_data = data_commands(place, one, place.folder / "data_one")
    [(code, out, error)] = ends([start([train, *of_data, *text_commands(place, one)])])
    assert code == 0, error

    of_shared = data_commands(place, shared, place.folder / "data_shared")
    del of_shared[1]  # tests/trainer/test_resume.py trains on two
    groups = [
        start_two(*[[*of_shared, *text_commands(place, shared)]] * 2),
        start_two(*(data_commands(place, separate, place.folder / f"data_{index}")
                    for index in range(2))),
    ]  # fmt: skip
    (first, second), (first_apart, second_apart) = map(ends, groups)
    for code, _, error in (first, second, first_apart, second_apart):
        assert code == 0, error
    assert (first[1], second[1]) == (out, "")
    assert out.startswith(first_apart[1]) and first_apart[1] and second_apart[1] == ""
    assert all("toy: process 0 prepares it; this process waits." in end[2]
               for end in (second, second_apart))  # fmt: skip

    assert "step 4/4" in first_apart[2] and "Step 4: validation" in first_apart[2]
    assert "tep 4" not in second_apart[2].replace("Finished after step 4", "")

    expected = contents(one)
    assert len(expected) == 4
    assert contents(shared) == {n: expected[n] for n in expected if n != "run/config.gin"}
    assert contents(separate) == {n: expected[n] for n in expected if "decode" not in n}
    assert losses(separate) == losses(one)
    hashes = {
        json.loads((place.folder / f"data_{name}/toy/manifest.json").read_text())["content_hash"]
        for name in ("one", "shared", 0, 1)
    }
    assert len(hashes) == 1


def test_processes_that_differ_say_in_what(place: Place, tmp_path: Path) -> None:
    same = [*settings_of(place), "--gin_param=TextFiles.train = 'text.txt'"]
    folders = [tmp_path / str(index) for index in range(2)]
    for index, folder in enumerate(folders):
        folder.mkdir()
        (folder / "text.txt").write_text(place.text.read_text() + "kara\n" * index)
    groups = {
        "content_hash of toy: ": start_two(
            *([["prepare", f"--data_dir={folder}", *same]] for folder in folders), cwds=folders
        ),
        "Run.steps: 4 in process 0, 5 in process 1.": start_two(
            [["prepare", f"--data_dir={tmp_path}", *same]],
            [["prepare", f"--data_dir={tmp_path}", *same, "--gin_param=Run.steps = 5"]],
            cwds=folders,
        ),
    }
    for expected, processes in groups.items():
        for code, out, error in ends(processes):
            assert (code, out) == (2, ""), error
            assert expected in error and "in process 1." in error


def test_a_process_that_waits_says_for_which() -> None:
    """Before any module of a command is imported, which would show log records too."""
    program = (
        "from scripts import cli, exits\n"
        "from trainer.processes import join\n"
        "join.LOG_EVERY_S = 0.1\n"
        "exits.exits(cli.cli.main)\n"
    )
    flags = ["--model_dir=none", "--process_count=2", "--process_index=0", "--start_timeout_s=1"]
    address = f"localhost:{free_port()}"
    ended = subprocess.run(
        [sys.executable, "-c", program, "train", *flags, f"--coordinator_address={address}"],
        cwd=ROOT, text=True, capture_output=True, timeout=WAIT_S,
    )  # fmt: skip
    assert ended.returncode == 1, ended.stderr
    assert f"Waiting for process 1 of 2 at {address}." in ended.stderr
