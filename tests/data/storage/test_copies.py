"""Copies that this machine keeps of remote folders."""

import os
from pathlib import Path

import pytest

from data.cache import TaskCaches, prepare
from data.listing import entries, prune
from data.sources.text import TextFiles
from data.storage import copies
from data.task import Task
from data.tokenizers.sentence_piece import SentencePiece


def test_a_folder_without_its_last_file_is_not_whole(
    there: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copies, "SCRATCH", tmp_path)
    folder = there / "rows"
    copy = copies.local_copy(folder)
    copy.mkdir(parents=True)
    for name in ("a", "last", "z"):
        (copy / name).write_text(name)
    copies.publish(copy, folder, last="last")
    (folder / "a").write_text("of another machine")
    assert (copies.fetch(folder, last="last") / "a").read_text() == "a"
    (copy / "last").write_text("another")
    contents = {p.name: p.read_text() for p in copies.fetch(folder, last="last").iterdir()}
    assert contents == {"a": "of another machine", "last": "last", "z": "z"}


def test_caches_of_two_settings_are_built_listed_and_removed(
    there: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copies, "SCRATCH", tmp_path / "scratch")
    (tmp_path / "text.txt").write_text("".join(f"the row number {i}\n" for i in range(200)))
    source = TextFiles(train=str(tmp_path / "text.txt"))
    tasks = [
        Task(name="mine", source=source, vocab=SentencePiece(size=280), length=length)
        for length in (12, 24)
    ]
    folders = [prepare(task, there).folder for task in tasks]
    assert [prepare(task, there).folder for task in tasks] == folders
    assert folders[0] == there / "mine" and folders[1].name.startswith("mine@")
    for task, kept, removed in ((tasks[0], *folders), (tasks[1], *folders[::-1])):
        listed = {entry.folder: entry for entry in entries(there, TaskCaches(task, there))}
        assert not listed[kept].reasons and listed[removed].written_s > 0
    assert listed[removed].is_prunable and prune(listed[removed])
    assert [entry.folder for entry in entries(there)] == [kept]


def test_a_text_of_another_date_is_compared_once_and_no_row_is_copied_again(
    there: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log_lines: list[str]
) -> None:
    monkeypatch.setattr(copies, "SCRATCH", tmp_path / "scratch")
    text = tmp_path / "text.txt"
    text.write_text("".join(f"the row number {i}\n" for i in range(200)))
    source = TextFiles(train=str(text))
    task = Task(name="mine", source=source, vocab=SentencePiece(size=280), length=12)
    rows = copies.local_copy(prepare(task, there).folder) / "train.targets.npy"
    copied = rows.stat()
    os.utime(text, (1, 1))
    for comparisons in (1, 0):
        log_lines.clear()
        prepare(task, there)
        assert sum("comparing the text" in line for line in log_lines) == comparisons
    assert rows.stat() == copied
