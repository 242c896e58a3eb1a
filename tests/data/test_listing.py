"""Caches of one folder: listed with what differs, and removed where nobody needs them."""

from pathlib import Path

import pytest

from data import manifest
from data.cache import TaskCaches, prepare
from data.listing import entries, prune
from data.sources.text import TextFiles
from data.storage import locks, lookup
from data.task import Task
from data.tokenizers.sentence_piece import SentencePiece


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    lines = [f"the row number {i} has words and a number {i * i % 97}\n" for i in range(300)]
    path.write_text("".join(lines))
    return path


def task_of(text: Path, length: int = 24, name: str = "mine") -> Task:
    source = TextFiles(train=str(text), validation_fraction=0.1)
    return Task(name=name, source=source, vocab=SentencePiece(size=300), length=length)


def test_caches_are_listed_and_those_of_other_settings_removed(text: Path, tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    tasks = [task_of(text), task_of(text, 48), task_of(text, 36), task_of(text, name="other")]
    folders = [prepare(task, data_dir).folder for task in tasks]
    (folders[2] / "manifest.json").write_text("{}")
    listed = {e.folder: e for e in entries(data_dir, TaskCaches(tasks[1], data_dir))}
    assert listed.keys() == set(folders)
    assert [listed[folder].is_prunable for folder in folders] == [True, False, True, False]
    assert listed[folders[0]].reasons == ("Task.length was 24 and is 48",)
    assert listed[folders[2]].reasons == ("it is damaged",)
    assert listed[folders[3]].task_name == "other" and not listed[folders[3]].is_compared
    assert listed[folders[0]].content_bytes == sum(n for _, n in lookup.sizes_below(folders[0]))
    assert all(prune(entry) for entry in listed.values() if entry.is_prunable)
    assert sorted(e.folder for e in entries(data_dir)) == sorted((folders[1], folders[3]))
    assert not list(data_dir.glob(".*building*"))


def test_a_cache_that_is_read_or_built_is_kept(text: Path, tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    prepared = prepare(task_of(text), data_dir)
    caches = TaskCaches(task_of(text, 48), data_dir)
    [entry] = entries(data_dir, caches)
    assert entry.is_used and not entry.is_prunable
    del prepared
    [entry] = entries(data_dir, caches)
    assert entry.is_prunable
    with locks.lock(entry.folder):
        assert entries(data_dir, caches)[0].is_used and not prune(entry)
    assert entry.folder.exists() and prune(entry) and not entry.folder.exists()


def test_without_settings_caches_are_compared_with_the_newest(text: Path, tmp_path: Path) -> None:
    first, second = (prepare(task_of(text, n), tmp_path / "data").folder for n in (24, 48))
    listed = {entry.folder: entry.reasons for entry in entries(tmp_path / "data")}
    assert listed == {second: (), first: ("Task.length was 24 and is 48",)}


def test_what_a_kill_left_is_listed_and_removed(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(manifest, "write", interrupt)
        prepare(task_of(text), tmp_path / "data")
    [entry] = entries(tmp_path / "data", TaskCaches(task_of(text), tmp_path / "data"))
    assert entry.reasons == ("it is not finished",) and entry.written_s > 0
    assert entry.content_bytes > 1000 and entry.is_prunable and prune(entry)
    assert entries(tmp_path / "data") == []
    assert not list((tmp_path / "data").glob("*building"))
