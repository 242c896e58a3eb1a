"""What takes the place of a file system's tricks in remote storage, where requests fail."""

import gzip
import io
import json
from collections.abc import Callable
from pathlib import Path

import aiohttp
import gcsfs
import pyarrow
import pytest
import requests
import zstandard
from pyarrow import parquet

from configs.errors import UserError
from configs.paths import path_of
from data import manifest
from data.cache import TaskCaches
from data.sources.compression import open_file, read_errors
from data.sources.json_lines import JsonlText
from data.sources.pair_kinds import Tsv
from data.sources.tables import TableText
from data.sources.text import TextFiles
from data.sources.text_files import expand, read_lines, stamps
from data.storage import remote
from data.storage.files import atomic_open, atomic_write, check_output, write_errors
from data.storage.remote import ConditionalObject
from data.tokenizers.sentence_piece import SentencePiece
from data.tokenizers.tokenizer_json import TokenizerJson
from data.vocab import make
from tests.clouds import BUCKET, Cloud, on_both
from tests.data.test_cache import task_of
from tests.data.tokenizers.test_tokenizer_json import byte_level
from tests.s3 import S3
from trainer.checkpoints.manager import Checkpoints
from trainer.metrics.plots import RunPlots
from trainer.model_dir import ModelDir


@on_both
def test_an_object_is_written_once_by_those_who_know_the_same(there: Path) -> None:
    first, second = (ConditionalObject(there / "lock") for _ in range(2))
    assert (first.read(), second.read()) == ("", "")
    assert first.write("first") and not second.write("second")
    assert second.read() == "first" and second.write("second")
    first.remove()
    assert not first.write("first") and (there / "lock").read_text() == "second"
    second.remove()
    assert first.read() == "" and first.write("first")


@on_both
def test_a_write_whose_answer_is_lost_counts_once(
    cloud: Cloud, there: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = ConditionalObject(there / "lock")
    assert lock.write("mine")
    answers = iter(["cut after"])
    monkeypatch.setattr(cloud, "fault", lambda: next(answers, None))
    assert lock.write("mine") and list(answers) == []
    lock.remove()
    assert not (there / "lock").exists()


@on_both
def test_a_file_appears_whole_or_not_at_all(there: Path) -> None:
    atomic_write(there / "file", "old")
    with pytest.raises(RuntimeError), atomic_open(there / "file") as file:
        file.write("new")
        raise RuntimeError
    assert (there / "file").read_text() == "old"
    with atomic_open(there / "file") as file:
        file.write("new")
    assert (there / "file").read_text() == "new"


@on_both
def test_texts_are_matched_and_read(there: Path) -> None:
    for name in ("b.txt", "a.txt", "c.md"):
        (there / name).write_bytes(b"one\r\ntwo\n")
    paths = expand(f"{there}/*.txt", "TextFiles.train")
    assert paths == [f"{there}/a.txt", f"{there}/b.txt"]
    assert list(read_lines(paths[0])) == ["one", "two"]
    before = stamps(paths)
    (there / "a.txt").write_bytes(b"one\r\nTwo\n")
    assert [path for path, stamp in stamps(paths).items() if stamp != before[path]] == paths[:1]
    with pytest.raises(UserError, match="no file matches"):
        expand(f"{there}/*.csv", "TextFiles.train")
    with pytest.raises(UserError, match="there is no such file"):
        next(read_lines(f"{there}/absent"))


@on_both
def test_a_bucket_that_is_not_there_is_named(cloud: Cloud, tmp_path: Path) -> None:
    check_output(f"{cloud.scheme}://{BUCKET}/file")
    with pytest.raises(UserError, match="there is no bucket"):
        check_output(f"{cloud.scheme}://another-bucket/file")
    absent = path_of(f"{cloud.scheme}://another-bucket/run")
    for look in (
        lambda: ModelDir(absent).load(),
        lambda: Checkpoints(absent).steps(),
        lambda: ConditionalObject(absent / "lock"),
        lambda: expand(f"{absent}/*.txt", "TextFiles.train"),
        lambda: next(read_lines(str(absent / "a.txt"))),
        lambda: TaskCaches(task_of(tmp_path / "a.txt"), absent),
        lambda: RunPlots(absent),
    ):
        with pytest.raises(UserError, match="there is no bucket 'another-bucket'"):
            look()


@pytest.mark.parametrize("cloud", ["s3"], indirect=True)
def test_wrong_credentials_are_one_line(
    cloud: S3, there: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cloud, "key", "another")
    for look in (lambda: check_output(there / "x"), lambda: atomic_write(there / "x", "x")):
        with pytest.raises(PermissionError) as error:
            look()
        text = "unexpected answer from the remote storage: The access key is unknown."
        assert remote.failure(error.value) == text


def test_a_web_page_in_place_of_an_answer_is_one_line() -> None:
    page = "<!DOCTYPE html>\n<html><head><title>Sign\nin</title></head>" + "<p>Pay.</p>\n" * 99
    with pytest.raises(json.JSONDecodeError) as error:
        json.loads(page)
    for problem in (error.value, OSError(f"Forbidden: b/x\n{page}"), requests.HTTPError(page)):
        text = remote.failure(problem)
        assert text is not None and text.endswith(
            "the answer is a web page (Sign in); a proxy or a sign-in page may be in the way"
        )
    assert remote.failure(json.JSONDecodeError("no", "{", 0)) is None


def test_what_is_forbidden_names_the_credentials() -> None:
    assert "check the credentials" in str(remote.failure(OSError("Forbidden: bucket/x")))
    assert "credentials" not in str(remote.failure(requests.ConnectionError("refused")))


def test_a_request_that_fails_is_no_damaged_data() -> None:
    assert remote.failure(requests.ConnectionError("refused")) is not None
    assert remote.failure(ValueError("UNAVAILABLE: HTTP 503")) is not None
    assert remote.failure(ValueError("Invalid endpoint: localhost:9000")) is not None
    assert remote.failure(ValueError("DATA_LOSS: Digest mismatch")) is None
    assert remote.failure(FileNotFoundError("gone")) is None


def test_a_storage_that_does_not_answer_is_no_mistake_of_the_users(
    there: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a.txt", "a.gz", "a.parquet"):
        (there / name).write_text("text")
    files = {name: f"{there}/a.{name}" for name in ("txt", "gz", "parquet")}
    calls: list[Callable[[], object]] = [
        lambda: list(read_lines(files["txt"])),
        lambda: list(read_lines(files["gz"])),
        lambda: list(TableText(train=files["parquet"], validation="-").lines("train")),
        lambda: TextFiles(train=files["txt"]).fingerprint(),
        lambda: Tsv(train=files["txt"]).fingerprint(),
        lambda: SentencePiece(model_file=files["txt"]).given(),
        lambda: manifest.load(there),
    ]

    async def refused(*_: object, **__: object) -> None:
        raise aiohttp.ClientOSError(104, "Connection reset by peer")

    monkeypatch.setattr(gcsfs.GCSFileSystem, "_call", refused)
    for call in calls:
        with pytest.raises(aiohttp.ClientOSError):
            call()
    for context in (read_errors("a.txt"), write_errors(tmp_path)):
        with pytest.raises(requests.ConnectionError), context:
            raise requests.ConnectionError("refused")


def test_a_compressed_object_is_closed_behind_its_text(there: Path) -> None:
    (there / "a.gz").write_bytes(gzip.compress(b"one"))
    with open_file(f"{there}/a.gz") as file:
        raw = file.raw._file
        assert file.read() == b"one"
    assert raw.closed


def test_compressed_text_tables_and_tokenizers_are_read_from_a_bucket(there: Path) -> None:
    for name, packed in (("a.gz", gzip.compress), ("b.zst", zstandard.compress)):
        (there / name).write_bytes(packed(b'{"text": "one"}\n'))
    assert list(JsonlText(train=f"{there}/?.*", validation="-").lines("train")) == ["one"] * 2
    buffer = io.BytesIO()
    parquet.write_table(pyarrow.table({"text": ["x"]}), buffer)
    (there / "x.parquet").write_bytes(buffer.getvalue())
    source = TableText(train=f"{there}/x.parquet", validation="-")
    assert list(source.lines("train")) == ["x"] and source.fingerprint() is None
    (there / "tokenizer.json").write_text(byte_level().to_str())
    assert make(TokenizerJson(path=str(there), end="</s>"), iter(())).end_id == 257
