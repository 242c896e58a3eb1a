"""One training at a time in a model directory."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from configs.errors import UserError
from data.storage.remote import ConditionalObject
from tests.toys import ROOT
from trainer.processes import training_lock
from trainer.processes.training_lock import FILE, Holder, holder_of, lock

OTHER = """
import sys
from pathlib import Path
from trainer.processes.training_lock import lock

with lock(Path(sys.argv[1])):
    print("locked", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def other(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that has locked the model directory."""
    with subprocess.Popen(
        [sys.executable, "-c", OTHER, str(tmp_path)], cwd=ROOT, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as process:  # fmt: skip
        assert process.stdout is not None and process.stdout.readline() == "locked\n"
        yield process
        process.kill()


def test_a_second_training_is_refused_until_the_first_ends(
    tmp_path: Path, other: subprocess.Popen[str], log_lines: list[str]
) -> None:
    since = json.loads((tmp_path / FILE).read_text())["since"]
    with (
        pytest.raises(UserError, match=f"process {other.pid} on .*, since") as error,
        lock(tmp_path),
    ):
        pass
    assert since in str(error.value) and str(tmp_path) in str(error.value)
    other.communicate("")
    with lock(tmp_path):
        assert json.loads((tmp_path / FILE).read_text())["pid"] == os.getpid()
    assert ((tmp_path / FILE).read_text(), log_lines) == ("", [])


def test_a_start_that_wrote_nothing_leaves_no_folder(tmp_path: Path) -> None:
    with lock(tmp_path / "run"):
        pass
    assert not (tmp_path / "run").exists()
    with lock(tmp_path / "run"):
        (tmp_path / "run/config.gin").write_text("")
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["config.gin", FILE]


def test_the_lock_of_a_killed_training_is_taken_over(
    tmp_path: Path, other: subprocess.Popen[str], log_lines: list[str]
) -> None:
    other.kill()
    other.wait()
    with lock(tmp_path):
        (line,) = log_lines
        assert f"process {other.pid} on" in line and "taken over" in line


@pytest.mark.parametrize("is_alive", [True, False])
def test_a_lock_of_another_host_counts_while_it_is_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_alive: bool
) -> None:
    monkeypatch.setattr(training_lock, "BEAT_S", 0.1)
    monkeypatch.setattr(training_lock, "SILENCE_S", 1.5)
    (tmp_path / FILE).write_text(json.dumps(vars(Holder(1, "elsewhere", "noon"))))
    file = tmp_path / (FILE if is_alive else "another")
    file.touch()
    with training_lock._beating(lambda: os.utime(file)):
        if is_alive:
            with pytest.raises(UserError, match="process 1 on elsewhere"), lock(tmp_path):
                pass
        else:
            with lock(tmp_path):
                pass


@pytest.mark.parametrize("is_alive", [True, False])
def test_a_lock_of_remote_storage_counts_while_it_is_written(
    there: Path, monkeypatch: pytest.MonkeyPatch, is_alive: bool
) -> None:
    monkeypatch.setattr(training_lock, "BEAT_S", 0.1)
    monkeypatch.setattr(training_lock, "SILENCE_S", 1.5)
    other = ConditionalObject(there / FILE)
    content = Holder(1, "elsewhere", "noon").dump()
    assert other.write(content)
    with training_lock._beating((lambda: other.write(content)) if is_alive else (lambda: None)):
        if is_alive:
            with pytest.raises(UserError, match="process 1 on elsewhere"), lock(there):
                pass
            return
        with lock(there):
            assert json.loads((there / FILE).read_text())["pid"] == os.getpid()
            assert not other.write(content)
        assert not (there / FILE).exists()


def test_a_training_whose_remote_lock_was_taken_over_ends(
    there: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = threading.Event()
    monkeypatch.setattr(training_lock, "BEAT_S", 0.1)
    monkeypatch.setattr(training_lock, "end_process", lambda code, line: ended.set())
    with lock(there):
        (there / FILE).write_text(Holder(1, "elsewhere", "noon").dump())
        assert ended.wait(20)
    assert (there / FILE).exists(), "it is the other one's"


def test_without_locks_of_the_system_the_process_is_looked_for(
    tmp_path: Path, other: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training_lock, "try_lock", lambda file: None)
    with pytest.raises(UserError, match=f"process {other.pid}"), lock(tmp_path):
        pass
    other.kill()
    other.wait()
    with lock(tmp_path):
        pass


@pytest.mark.parametrize("content", ["", "{", "[]", '{"pid": 1}'])
def test_a_lock_that_says_nothing_is_free(tmp_path: Path, content: str) -> None:
    (tmp_path / FILE).write_text(content)
    with lock(tmp_path):
        assert json.loads((tmp_path / FILE).read_text())["pid"] == os.getpid()


@pytest.mark.parametrize("content", [b'{"pid": 1, "host": "\xff", "since": "now"}', b"[" * 10**5,
    b'{"pid": 1e400, "host": "h", "since": "now"}', b'{"pid": 1, "host": [], "since": "now"}',
])  # fmt: skip
def test_a_lock_of_odd_bytes_or_types_names_nobody(tmp_path: Path, content: bytes) -> None:
    (tmp_path / FILE).write_bytes(content)
    assert holder_of(tmp_path) is None
    with lock(tmp_path):
        pass
