"""The cache: built whole, reused at once, refused when it belongs to something else."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from configs.errors import RunError, UserError
from data.cache import prepare
from data.source import TextFiles
from data.task import Task
from data.vocab import SentencePiece, make

TEXT = [f"the row number {i} of this text has words and a number {i * i % 97}" for i in range(400)]
FILES = ["manifest.json", "train.segments.npy", "train.targets.npy", "validation.segments.npy"]


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("\n".join(TEXT) + "\n")
    return path


@pytest.fixture
def data_dir(tmp_path):
    return tmp_path / "data"


def task_of(text, *, size=320, length=24, name="mine", **options):
    source = TextFiles(train=str(text), validation_fraction=0.1)
    return Task(name=name, source=source, vocab=SentencePiece(size=size), length=length, **options)


def decoded(prepared, split):
    rows, found = prepared.splits[split], []
    batch = rows.batch(np.arange(len(rows)))
    for targets, segments in zip(batch["targets_BL"], batch["segments_BL"], strict=True):
        for segment in range(1, segments.max() + 1):
            found.append(prepared.vocab.decode(targets[segments == segment]))
    return found


def test_the_rows_hold_the_text(text, data_dir):
    prepared = prepare(task_of(text, length=128), data_dir)
    found = [decoded(prepared, split) for split in ("train", "validation")]
    assert sorted(found[0] + found[1]) == sorted(TEXT)
    manifest = json.loads((data_dir / "mine" / "manifest.json").read_text())
    assert manifest == prepared.manifest
    assert sum(s["words"] for s in manifest["splits"].values()) == sum(len(x.split()) for x in TEXT)
    assert manifest["settings"]["SentencePiece.size"] == 320


def test_a_second_call_reads_no_text_and_writes_nothing(text, data_dir):
    first = prepare(task_of(text), data_dir)
    stamps = {p.name: p.stat().st_mtime_ns for p in (data_dir / "mine").iterdir()}
    os.chmod(text, 0)
    said = []
    second = prepare(task_of(text), data_dir, report=said.append)
    assert said == []
    assert {p.name: p.stat().st_mtime_ns for p in (data_dir / "mine").iterdir()} == stamps
    assert second.vocab.hash == first.vocab.hash
    assert (second.splits["train"].targets_BL == first.splits["train"].targets_BL).all()


def test_building_twice_gives_the_same_bytes(text, data_dir):
    first = _contents(prepare(task_of(text), data_dir) and data_dir / "mine")
    prepare(task_of(text), data_dir, rebuild=True)
    assert _contents(data_dir / "mine") == first


def test_other_settings_are_named(text, data_dir):
    prepare(task_of(text), data_dir)
    with pytest.raises(UserError) as error:
        prepare(task_of(text, size=330, length=48, packs=False), data_dir)
    message = str(error.value)
    assert "SentencePiece.size: 320 in the cache, 330 now." in message
    assert "Task.length: 24 in the cache, 48 now." in message
    assert "Task.packs: True in the cache, False now." in message
    for remedy in ("Task.name", "--data_dir", "meshloom prepare --rebuild"):
        assert remedy in message


def test_a_changed_word_list_is_named(text, data_dir, tmp_path):
    words = tmp_path / "words"
    words.write_text("the\nrow\n")
    prepared = prepare(task_of(text, word_list=str(words)), data_dir)
    assert decoded(prepared, "train")[0].startswith("the row <UNK>")
    words.write_text("the\nrow\nnumber\n")
    with pytest.raises(UserError, match=r"the text of Task.word_list: '.*' in the cache, '.*' now"):
        prepare(task_of(text, word_list=str(words)), data_dir)


def test_other_text_is_refused_but_a_new_date_is_not(text, data_dir):
    prepare(task_of(text), data_dir)
    os.utime(text, (1, 1))
    said = []
    prepare(task_of(text), data_dir, report=said.append)
    assert len(said) == 1 and "comparing the text" in said[0]
    prepare(task_of(text), data_dir, report=said.append)
    assert len(said) == 1, "the new date is remembered"
    text.write_text("\n".join(TEXT[1:]) + "\n")
    with pytest.raises(UserError, match=r"other settings or text.\n  text: '.*' in the cache"):
        prepare(task_of(text), data_dir)
    prepare(task_of(text), data_dir, rebuild=True)


def test_a_cache_serves_without_its_text(text, data_dir):
    prepare(task_of(text), data_dir)
    text.unlink()
    said = []
    assert len(prepare(task_of(text), data_dir, report=said.append).splits["train"])
    assert "its text is not on this machine" in said[0]


def test_a_given_vocab_is_used_and_another_refused(text, data_dir):
    given, other = (make(SentencePiece(size=n), iter(TEXT)) for n in (300, 310))
    assert prepare(task_of(text), data_dir, vocab=given).vocab.hash == given.hash
    assert prepare(task_of(text), data_dir, vocab=given).vocab.hash == given.hash
    with pytest.raises(UserError, match=r"vocab: '.*' in the cache, '.*' now"):
        prepare(task_of(text), data_dir, vocab=other)


@pytest.mark.parametrize("name", [*FILES, "vocab.model"])
def test_a_truncated_file_is_named(text, data_dir, name):
    prepare(task_of(text), data_dir)
    path = data_dir / "mine" / name
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(
        UserError, match=r"mine.*(damaged|no whole cache).*meshloom prepare --rebuild"
    ):
        prepare(task_of(text), data_dir)
    prepare(task_of(text), data_dir, rebuild=True)


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_named(text, data_dir, name):
    prepare(task_of(text), data_dir)
    (data_dir / "mine" / name).unlink()
    with pytest.raises(UserError, match=r"meshloom prepare --rebuild"):
        prepare(task_of(text), data_dir)


def test_bad_text_leaves_nothing(text, data_dir):
    text.write_bytes(text.read_bytes() + b"bad \xff line\n")
    with pytest.raises(UserError, match=r"text\.txt, line 401: byte 5 is 0xff, not UTF-8"):
        prepare(task_of(text), data_dir)
    assert _left(data_dir) == []


def test_a_split_without_lines_is_named(text, data_dir):
    text.write_text("one line of text alone is here\n")
    with pytest.raises(UserError, match=r"mine: the split '\w+' has no lines|no text to train on"):
        prepare(task_of(text, size=280), data_dir)
    assert _left(data_dir) == []


@pytest.mark.parametrize("old", [False, True])
def test_a_full_disk_leaves_the_old_cache_or_nothing(text, data_dir, monkeypatch, old):
    if old:
        prepare(task_of(text), data_dir)
    before = _contents(data_dir / "mine") if old else None
    # Every byte written to the device is refused with ENOSPC, by the kernel.
    ordinary = Path.open

    def full(path, mode="r", *rest, **options):
        path = Path("/dev/full") if "x" in mode else path
        return ordinary(path, mode.replace("x", "w"), *rest, **options)

    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(RunError, match=r"data/mine: the disk is full; .*--data_dir"):
        prepare(task_of(text), data_dir, rebuild=True)
    assert _left(data_dir) == (["mine"] if old else [])
    if old:
        assert _contents(data_dir / "mine") == before


KILLED = """
import os, signal, sys
from data import build
from data.cache import prepare
from tests.data.test_cache import task_of
write = build.manifest.write
build.manifest.write = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
prepare(task_of(sys.argv[1]), sys.argv[2])
"""


def test_a_kill_leaves_nothing_that_looks_like_a_cache(text, data_dir):
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": f"{root}:{os.environ.get('PYTHONPATH', '')}"}
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, str(text), str(data_dir)], env=environment, cwd=root
    )
    assert killed.returncode == -signal.SIGKILL
    assert not (data_dir / "mine").exists()
    assert any(".building-" in name for name in _left(data_dir))
    prepare(task_of(text), data_dir)
    assert _left(data_dir) == ["mine"]


def _left(data_dir):
    return [p.name for p in data_dir.iterdir() if p.name != ".mine.lock"]


def _contents(folder):
    return {p.name: p.read_bytes() for p in folder.iterdir()}
