"""Datasets of the Hugging Face Hub, from a server on this machine that answers as it does."""

import hashlib
import http.server
import io
import json
import re
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast
from urllib.parse import parse_qs, urlparse

import fsspec
import huggingface_hub
import huggingface_hub.constants
import pyarrow
import pytest
from pyarrow import parquet

from configs.errors import UserError
from configs.paths import path_of
from data.cache import TaskCaches
from data.sources.tables import TableText
from data.sources.text import TextFiles
from data.storage import lookup, remote

LINES = [f"line {i} of a text\n" for i in range(500)]


def table() -> bytes:
    file = io.BytesIO()
    parquet.write_table(pyarrow.table({"text": ["one", "two", "three"]}), file)
    return file.getvalue()


FILES = {
    "text/a.txt": "".join(LINES[:300]).encode(),
    "text/b.txt": "".join(LINES[300:]).encode(),
    "tables/train.parquet": table(),
}


class Hub(http.server.BaseHTTPRequestHandler):
    """Answers what is asked about one public data set, owner/texts."""

    def do_GET(self) -> None:
        path = urlparse(self.path).path
        root = "/api/datasets/owner/texts"
        page = root.replace("texts", "page")
        if path in (root, f"{root}/revision/main", page, f"{page}/revision/main"):
            return self.answer({"id": "owner/texts", "sha": "0" * 40, "siblings": []})
        if path == f"{root}/tree/main/refused":
            return self.answer({"error": "not today"}, 400)
        if path == f"{root}/tree/main/short":
            return self.answer([{"type": "file", "oid": "1", "size": 9, "path": "short/a.txt"}])
        if (tree := re.fullmatch(rf"{root}/tree/main/?(.*)", path)) is not None:
            return self.answer(self.entries(tree[1]))
        if (name := path.removeprefix("/datasets/owner/texts/resolve/main/")) in FILES:
            return self.content(FILES[name])
        if path.endswith("/short/a.txt"):
            is_head = self.command == "HEAD"
            return self.content(LINES[0].encode() * (1 + is_head))
        if path.startswith("/datasets/owner/page/"):
            return self.reply(200, b"<html><title>Sign in</title></html>", {})
        return self.answer({"error": "Repository not found"}, 404)

    do_HEAD = do_GET

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        is_json = "json" in self.headers["Content-Type"]
        paths = json.loads(body)["paths"] if is_json else parse_qs(body)["paths"]
        folders = {str(Path(name).parent) for name in FILES}
        every = [self.entry(name) for name in paths if name in FILES]
        every += [{"type": "directory", "oid": "0", "path": p} for p in paths if p in folders]
        self.answer(every)

    def entries(self, folder: str) -> list[dict[str, object]]:
        files = [self.entry(name) for name in FILES if name.startswith(folder)]
        if folder:
            return files
        return [*files, *({"type": "directory", "oid": "0", "path": p} for p in ("text", "tables"))]

    def entry(self, name: str) -> dict[str, object]:
        oid = hashlib.sha1(FILES[name]).hexdigest()
        return {"type": "file", "oid": oid, "size": len(FILES[name]), "path": name}

    def content(self, content: bytes) -> None:
        etag = hashlib.sha1(content).hexdigest()
        self.reply(200, content, {"ETag": f'"{etag}"', "X-Repo-Commit": "0" * 40})

    def answer(self, value: object, status: int = 200) -> None:
        missing = "EntryNotFound" if "/resolve/" in self.path else "RepoNotFound"
        headers = {"X-Error-Code": missing} if status == 404 else {}
        self.reply(status, json.dumps(value).encode(), headers)

    def reply(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Prints nothing."""


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    path_of("hf://datasets/owner/texts/x")  # sets fsspec up
    with pytest.MonkeyPatch.context() as patch:
        address = f"http://127.0.0.1:{server.server_port}"
        patch.setitem(fsspec.config.conf["hf"], "endpoint", address)
        cache = str(tmp_path_factory.mktemp("hub"))
        patch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", cache)
        huggingface_hub.HfFileSystem.clear_instance_cache()
        yield
    huggingface_hub.HfFileSystem.clear_instance_cache()
    server.shutdown()
    server.server_close()


@pytest.mark.usefixtures("hub")
def test_text_and_tables_are_read() -> None:
    text = TextFiles(train="hf://datasets/owner/texts/text/*.txt")
    lines = [*text.lines("train"), *text.lines("validation")]
    assert sorted(lines) == sorted(line.rstrip("\n") for line in LINES)
    rows = TableText(train="hf://datasets/owner/texts/tables/train.parquet")
    assert list(rows.lines("train")) == ["one", "two", "three"]
    path = path_of("hf://datasets/owner/texts/text/a.txt")
    assert lookup.version(path)[0] == len(FILES["text/a.txt"])
    assert dict(lookup.sizes_below(path.parent)) == {
        Path(name).name: len(FILES[name]) for name in ("text/a.txt", "text/b.txt")
    }


@pytest.mark.usefixtures("hub")
def test_what_is_not_there_or_not_written_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no such repository.*HF_TOKEN"):
        list(TextFiles(train="hf://datasets/owner/other/*.txt").lines("train"))
    with pytest.raises(UserError, match="no file matches"):
        list(TextFiles(train="hf://datasets/owner/texts/none/*.txt").lines("train"))
    for wrong in ("owner/texts", "datasets/owner", "datasets/o/t@/x", "datasets/o/t//x", "a b/c/d"):
        with pytest.raises(
            UserError, match=r"names no object in a bucket.*hf://datasets/owner/name/file"
        ):
            path_of(f"hf://{wrong}")
    with pytest.raises(UserError, match="there is no such file"):
        lookup.read_bytes("x", path_of("hf://datasets/owner/texts/text/none.txt"))
    with pytest.raises(Exception) as error:
        lookup.read_bytes("x", path_of("hf://datasets/owner/page/text/a.txt"))
    assert remote.failure(error.value) is not None  # a web page is no text
    with pytest.raises(UserError, match="hf:// is read-only"):
        TaskCaches(cast(Any, None), "hf://datasets/owner/texts/data", None, None)
    with pytest.raises(UserError, match="hf:// is read-only"):
        remote.ConditionalObject(path_of("hf://datasets/owner/texts/train.lock"))
    (tmp_path / "x").write_text("x")
    with pytest.raises(UserError, match="hf:// is read-only"):
        remote.upload(tmp_path / "x", path_of("hf://datasets/owner/texts/x"))


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize("folder", ["refused", "short"])
def test_an_error_of_the_server_is_no_missing_file(folder: str) -> None:
    """Of the listing, or of a download that ends early."""
    with pytest.raises(Exception) as error:
        list(TextFiles(train=f"hf://datasets/owner/texts/{folder}/a.txt").lines("train"))
    said = remote.failure(error.value)
    assert said is not None and ("not today" in said or "Consistency check failed" in said)


@pytest.mark.usefixtures("hub")
def test_offline_a_text_is_as_one_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that were made from it are found by the settings alone."""
    text = TextFiles(train="hf://datasets/owner/texts/text/*.txt")
    assert text.fingerprint()

    def refuse(*_: object, **__: object) -> None:
        raise huggingface_hub.errors.OfflineModeIsEnabled

    monkeypatch.setattr(lookup, "version", refuse)
    monkeypatch.setattr(lookup, "matches", refuse)
    assert text.fingerprint() is None
