"""Folders that appear whole or not at all."""

import os
from pathlib import Path

import pytest
import requests

from configs.errors import UserError
from data.cache import prepare
from data.sources.text import TextFiles
from data.storage import folders
from data.storage.folders import resumable_folder, whole_folder
from data.task import Task
from data.tokenizers.sentence_piece import SentencePiece


def test_a_folder_appears_whole_and_replaces_the_old(tmp_path):
    for text in ("old", "new"):
        with whole_folder(tmp_path / "x") as folder:
            (folder / "file").write_text(text)
            assert not (tmp_path / "x").exists() or (tmp_path / "x/file").read_text() == "old"
    assert (tmp_path / "x/file").read_text() == "new"
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, UserError("x"), RuntimeError])
def test_an_error_leaves_the_old_folder_and_nothing_else(tmp_path, error):
    with whole_folder(tmp_path / "x") as folder:
        (folder / "file").write_text("old")
    with (
        pytest.raises((KeyboardInterrupt, ValueError, RuntimeError)),
        whole_folder(tmp_path / "x") as folder,
    ):
        (folder / "file").write_text("half")
        raise error
    assert (tmp_path / "x/file").read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


def test_a_build_that_the_storage_ends_goes_on_where_it_was(tmp_path: Path) -> None:
    with pytest.raises(requests.ConnectionError), resumable_folder(tmp_path / "rows") as folder:
        (folder / "part").touch()
        raise requests.ConnectionError("refused")
    with resumable_folder(tmp_path / "rows") as folder:
        assert (folder / "part").exists()


def test_a_folder_without_its_last_file_is_not_whole(
    there: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders, "SCRATCH", tmp_path)
    folder = there / "rows"
    copy = folders.local_copy(folder)
    copy.mkdir(parents=True)
    for name in ("a", "last", "z"):
        (copy / name).write_text(name)
    folders.publish(copy, folder, last="last")
    (folder / "a").write_text("of another machine")
    assert (folders.fetch(folder, last="last") / "a").read_text() == "a"
    (copy / "last").write_text("another")
    contents = {p.name: p.read_text() for p in folders.fetch(folder, last="last").iterdir()}
    assert contents == {"a": "of another machine", "last": "last", "z": "z"}


def test_caches_of_two_settings_are_built_listed_and_removed(
    there: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders, "SCRATCH", tmp_path / "scratch")
    (tmp_path / "text.txt").write_text("".join(f"the row number {i}\n" for i in range(200)))
    source = TextFiles(train=str(tmp_path / "text.txt"))
    tasks = [
        Task(name="mine", source=source, vocab=SentencePiece(size=280), length=length)
        for length in (12, 24)
    ]
    paths = [prepare(task, there).folder for task in tasks]
    assert [prepare(task, there).folder for task in tasks] == paths
    assert paths[0] == there / "mine" and paths[1].name.startswith("mine@")


def test_a_text_of_another_date_is_compared_once_and_no_row_is_copied_again(
    there: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log_lines: list[str]
) -> None:
    monkeypatch.setattr(folders, "SCRATCH", tmp_path / "scratch")
    text = tmp_path / "text.txt"
    text.write_text("".join(f"the row number {i}\n" for i in range(200)))
    source = TextFiles(train=str(text))
    task = Task(name="mine", source=source, vocab=SentencePiece(size=280), length=12)
    rows = folders.local_copy(prepare(task, there).folder) / "train.targets.npy"
    copied = rows.stat()
    os.utime(text, (1, 1))
    for comparisons in (1, 0):
        log_lines.clear()
        prepare(task, there)
        assert sum("comparing the text" in line for line in log_lines) == comparisons
    assert rows.stat() == copied
