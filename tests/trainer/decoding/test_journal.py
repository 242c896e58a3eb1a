"""The journal of an output: what a crash leaves is continued, by the same settings alone."""

import socket
from pathlib import Path

import pytest

from configs.errors import UserError
from tests.clouds import on_both
from trainer.decoding.journal import Journal
from trainer.processes import training_lock
from trainer.translation.metrics import text_hash

SETTINGS = {"input": text_hash([["a", "b"]])[:16], "beam": 4}
TEXTS = [["one", -1.5, -2.0]]


def test_a_journal_continues_and_ends_in_the_output(tmp_path: Path) -> None:
    output = tmp_path / "out.txt"
    with Journal(output, SETTINGS) as journal:
        assert not journal.is_done() and journal.open() == {}
        journal.add([(1, TEXTS)])
    with (tmp_path / "out.txt.part").open("a") as file:
        file.write('{"line": 0, "hypo')  # cut by a crash
    with Journal(output, SETTINGS) as journal:
        assert journal.open() == {1: TEXTS}
        journal.add([(0, TEXTS)])
        journal.finish(lambda file: file.write("done\n") and None)
    assert output.read_text() == "done\n" and Journal(output, SETTINGS).is_done()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.txt", "out.txt.made"]


def test_other_settings_are_refused_by_name(tmp_path: Path) -> None:
    with Journal(tmp_path / "out.txt", SETTINGS) as journal:
        journal.open()
        journal.add([(0, TEXTS)])
    other = Journal(tmp_path / "out.txt", SETTINGS | {"beam": 2})
    with pytest.raises(UserError, match=r"(?s)made with different settings.*beam: 4 there, 2 now"):
        other.open()


def test_a_second_decoding_of_one_output_is_refused(tmp_path: Path) -> None:
    with Journal(tmp_path / "out.txt", SETTINGS) as first:
        first.open()
        first.add([(0, TEXTS)])
        with (
            pytest.raises(UserError, match=r"out\.txt\.part: another process is writing it"),
            Journal(tmp_path / "out.txt", SETTINGS) as second,
        ):
            second.open()
        first.add([(1, TEXTS)])
    with Journal(tmp_path / "out.txt", SETTINGS) as third:
        assert third.open() == {0: TEXTS, 1: TEXTS}


@on_both
def test_a_second_decoding_of_one_remote_output_is_refused(
    there: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(training_lock, "BEAT_S", 0.1)
    monkeypatch.setattr(training_lock, "SILENCE_S", 1.5)
    first, second = (Journal(there / "out.txt", SETTINGS) for _ in range(2))
    second.journal_file = tmp_path / "out.txt.part"  # of another machine
    monkeypatch.setenv("HOME", str(tmp_path))
    with first:
        first.open()
        monkeypatch.setattr(socket, "gethostname", lambda: "elsewhere")
        with (
            pytest.raises(UserError, match=r"out\.txt: another decoding .*another --output"),
            second,
        ):
            second.open()
        first.finish(lambda file: file.write("done\n") and None)
    assert second.is_done()
    assert sorted(path.name for path in there.iterdir()) == ["out.txt", "out.txt.made"]
