"""Google Cloud Storage on this machine."""

import contextlib
import dataclasses
import json
import logging
import re
import threading
import urllib.parse
from collections.abc import Iterator
from typing import Any, ClassVar

from tests.clouds import BUCKET, Cloud, proxy
from tests.launch_local import free_port


@dataclasses.dataclass
class Gcs(Cloud):
    """Emulated by gcp-storage-emulator."""

    scheme: ClassVar[str] = "gs"
    uploads: dict[str, Any] = dataclasses.field(default_factory=dict)
    writing: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    @property
    def environment(self) -> dict[str, str]:
        return {
            "STORAGE_EMULATOR_HOST": self.address,  # of gcsfs and of Google's client
            "TENSORSTORE_GCS_HTTP_URL": self.address,
            "GOOGLE_AUTH_TOKEN_FOR_TESTING": "none",
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",  # it would ask Google about the bucket
        }

    def generation(self, name: str) -> str:
        """Number of the write that made an object; "0" where there is none."""
        quoted = urllib.parse.quote(name, safe="")
        status, _, body = self.forward("GET", f"/storage/v1/b/{BUCKET}/o/{quoted}")
        return json.loads(body)["generation"] if status == 200 else "0"

    def answer(self, method: str, path: str, body: bytes, headers: Any) -> Any:
        """Adds what the emulator lacks: moves, conditions on the generation and its header, and
        the last part of an upload that is sent twice.
        """
        move = re.fullmatch(r"(/storage/v1/b/([^/]+)/o/[^/]+)/moveTo/o/([^/?]+)(\?.*)?", path)
        if move:
            copied = self.forward("POST", f"{move[1]}/rewriteTo/b/{move[2]}/o/{move[3]}")
            self.forward("DELETE", move[1])
            return copied
        url = urllib.parse.urlsplit(path)
        if method == "GET" and "alt=media" in url.query:
            with self.writing:  # what is read belongs to the generation
                status, kept, content = self.forward(method, path, body, headers)
                name = urllib.parse.unquote(url.path.partition("/o/")[2])
                return status, [*kept, ("x-goog-generation", self.generation(name))], content
        if "upload_id=" in url.query:
            if path not in self.uploads:
                answer = self.forward(method, path, body, headers)
                if answer[0] != 200:  # 308: more parts are to come
                    return answer
                self.uploads[path] = answer
            return self.uploads[path]
        if method == "GET" or "ifGenerationMatch=" not in path:
            return self.forward(method, path, body, headers)
        query = urllib.parse.parse_qs(url.query)
        in_path = re.search(r"/o/([^/]+)$", url.path)
        in_body = re.search(rb'"name": ?"([^"]+)"', body)
        quoted = in_path[1] if in_path else query.get("name", [in_body and in_body[1].decode()])[0]
        with self.writing:
            if self.generation(urllib.parse.unquote(quoted)) != query["ifGenerationMatch"][0]:
                error = {"error": {"code": 412, "message": "conditionNotMet"}}
                return 412, [("Content-Type", "application/json")], json.dumps(error).encode()
            return self.forward(method, path, body, headers)


@contextlib.contextmanager
def running_gcs() -> Iterator[Gcs]:
    """Runs the emulator and the proxy in threads."""
    from gcp_storage_emulator.server import create_server

    logging.getLogger("gcp_storage_emulator").setLevel(logging.CRITICAL)
    cloud = Gcs(free_port(), free_port())
    emulator = create_server(
        "127.0.0.1", cloud.emulator_port, in_memory=True, default_bucket=BUCKET
    )
    emulator.start()
    with proxy(cloud):
        yield cloud
    emulator.stop()
