"""Packing on the workers of a Beam pipeline: the same bytes, in local folders and in the cloud.

Tests that run a pipeline are skipped where apache-beam is not installed.
"""

import dataclasses
import sys
from pathlib import Path

import numpy as np
import pytest

from configs.errors import UserError
from data import build
from data.build import PackedChunk, Packing
from data.cache import prepare
from data.pipeline import BeamPipeline
from data.sources.pair_kinds import Tsv
from data.storage import folders
from data.storage.files import Unfinished
from data.storage.folders import unfinished
from data.task import Example, Task
from data.tasks.translation import Translation
from data.tokenizers.sentence_piece import SentencePiece
from tests.data.test_build import CHUNK, contents, task_of, text  # noqa: F401

TWO_PROCESSES = BeamPipeline(
    "DirectRunner", ("--direct_num_workers=2", "--direct_running_mode=multi_processing")
)


@pytest.fixture
def beam() -> None:
    pytest.importorskip("apache_beam")


@pytest.fixture
def no_beam(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "apache_beam", None)


@pytest.fixture(scope="module")
def packing(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Packing:  # noqa: F811
    prepared = prepare(task_of(text), tmp_path_factory.mktemp("packing"))
    return Packing(task_of(text), prepared.vocabs, prepared.manifest["versions"])


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Task:
    path = tmp_path_factory.mktemp("pairs") / "pairs.tsv"
    path.write_text("".join(f"source {i}\ttarget {i * i} of it\n" for i in range(300)))
    return Translation(
        name="mine", source=Tsv(train=str(path), validation_fraction=0.1),
        vocab=SentencePiece(size=290), length=48, source_length=40,
    )  # fmt: skip


def packed(chunks: list[list[Example]], packing: Packing, folder: Path) -> list[PackedChunk]:
    return list(TWO_PROCESSES.in_order(((c, None, True) for c in chunks), packing, folder))


def assert_packed(chunks: list[list[Example]], packing: Packing, folder: Path) -> None:
    pack = packing()
    for chunk, (arrays, counts) in zip(chunks, packed(chunks, packing, folder), strict=True):
        expected, expected_counts = pack(chunk, None, True)
        assert counts == expected_counts and arrays.keys() == expected.keys()
        for name, array in expected.items():
            np.testing.assert_array_equal(arrays[name], array, strict=True)


def test_without_the_package_the_error_says_what_to_install(no_beam: None) -> None:
    with pytest.raises(UserError, match=r"not installed: pip install -e '.\[beam\]'"):
        TWO_PROCESSES.check()


def test_chunks_that_are_packed_are_not_packed_again(
    packing: Packing, tmp_path: Path, no_beam: None
) -> None:
    """Without Beam only a single chunk can be packed: one of each list is new."""
    for names in ("", "a", "aa", "ab", "cabac"):
        assert_packed([[f"text of {name} é\u2028"] * 3 for name in names], packing, tmp_path)
    with pytest.raises(UserError, match="apache_beam"):
        packed([["one"], ["two"]], packing, tmp_path)
    other = dataclasses.replace(packing, task=dataclasses.replace(packing.task, length=13))
    assert_packed([["text of a é\u2028"] * 3], other, tmp_path)


def test_a_worker_with_another_tokenizer_is_refused(packing: Packing, tmp_path: Path) -> None:
    other = dataclasses.replace(packing, versions={"sentencepiece": "0.0.1"})
    with pytest.raises(UserError, match=r"has sentencepiece .*, and the command 0\.0\.1\."):
        packed([["one"]], other, tmp_path)
    assert not list(tmp_path.glob("*.npz"))


def test_a_worker_without_the_folder_is_refused(packing: Packing, tmp_path: Path) -> None:
    from data.pipeline import _Worker

    with pytest.raises(Unfinished, match=r"a folder that all workers share, or gs://"):
        _Worker(packing, str(tmp_path / "elsewhere")).pack("0123")


@pytest.mark.parametrize("kind", ["text", "pairs"])
def test_splits_of_one_chunk_need_no_pipeline(
    text: Path,  # noqa: F811
    pairs: Task,
    tmp_path: Path,
    kind: str,
    no_beam: None,
) -> None:
    task = pairs if kind == "pairs" else task_of(text)
    expected = contents(prepare(task, tmp_path / "a").folder)
    assert contents(prepare(task, tmp_path / "b", pipeline=TWO_PROCESSES).folder) == expected


@pytest.mark.parametrize("pipeline", [TWO_PROCESSES, None])
def test_what_a_killed_pipeline_left_is_removed(
    text: Path,  # noqa: F811
    tmp_path: Path,
    pipeline: BeamPipeline | None,
) -> None:
    building = unfinished(tmp_path / "mine")
    (building / "chunks").mkdir(parents=True)
    (building / "chunks/0123").write_bytes(b"of another text")
    folder = prepare(task_of(text), tmp_path, pipeline=pipeline).folder
    assert not building.exists() and not (folder / "chunks").exists()


@pytest.mark.parametrize(("place", "kind"), [("tmp_path", "pairs"), ("there", "text")])
def test_two_processes_of_the_direct_runner_give_the_same_bytes(
    text: Path,  # noqa: F811
    pairs: Task,
    tmp_path: Path,
    place: str,
    kind: str,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    beam: None,
) -> None:
    monkeypatch.setattr(build, "_CHUNK_EXAMPLES", CHUNK)
    monkeypatch.setattr(folders, "SCRATCH", tmp_path / "scratch")
    task = pairs if kind == "pairs" else task_of(text)
    data_dir = request.getfixturevalue(place) / "data"
    expected = prepare(task, tmp_path / "expected")
    prepared = prepare(task, data_dir, pipeline=TWO_PROCESSES)
    assert prepared.manifest["content_hash"] == expected.manifest["content_hash"]
    assert prepared.manifest["splits"]["train"]["chunks"] > 3
    assert contents(prepared.folder) == contents(expected.folder)
    assert {path.name for path in data_dir.iterdir()} <= {"mine", ".mine.lock"}


def test_a_worker_that_fails_ends_the_pipeline(
    packing: Packing, tmp_path: Path, beam: None
) -> None:
    with pytest.raises(Unfinished, match=r"DirectRunner failed: \w+Error: .*goes on"):
        packed([["one"], ["two"], [None]], packing, tmp_path)  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("pipeline", "message"),
    [
        (BeamPipeline("Nearest"), "--runner=Nearest: .*DirectRunner"),
        (BeamPipeline("DataflowRunner", ("--project=x",)), "--runner=DataflowRunner: .*"),
    ],
)
def test_a_runner_is_checked_before_the_text_is_read(
    pipeline: BeamPipeline, message: str, beam: None
) -> None:
    with pytest.raises(UserError, match=message):
        pipeline.check()
