"""Reads and writes objects of Google Cloud Storage, and explains its errors.

An object appears whole and is replaced whole; it cannot grow, be renamed, locked or mapped.  The
other modules of this folder know what is done in place of these.
"""

import contextlib
import functools
import json
import logging
import re
from pathlib import Path
from typing import Any

from configs.errors import UserError, brief, one_line
from configs.paths import REMOTE, is_remote

# What gcsfs logs as an error, with a traceback, it also raises.
logging.getLogger("gcsfs").setLevel(logging.CRITICAL)

_LIBRARIES = {"gcsfs", "fsspec", "google", "aiohttp", "requests"}
_PAGE = re.compile(r"(?is)<(!doctype )?html(.*?<title>(?P<title>.*?)</title>)?")
_UNREACHABLE = ("UNAVAILABLE", "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED", "UNAUTHENTICATED",
                "PERMISSION_DENIED")  # fmt: skip
"""What TensorStore's errors begin with where its retries did not help."""


def failure(error: BaseException) -> str | None:
    """Describes how the storage failed to answer; None for other errors."""
    library = type(error).__module__.partition(".")[0]
    is_of_tensorstore = any(str(error).startswith(word) for word in _UNREACHABLE)
    is_forbidden = isinstance(error, OSError) and str(error).startswith("Forbidden: ")
    page = _PAGE.search(error.doc if isinstance(error, json.JSONDecodeError) else str(error))
    is_page = isinstance(error, json.JSONDecodeError) and page is not None
    if not (library in _LIBRARIES or is_of_tensorstore or is_forbidden or is_page):
        return None
    text = one_line(error)
    if page is not None:
        title = brief(" ".join((page["title"] or "without a title").split()))
        text = f"a web page answers ({title}); a proxy or a sign-in page may be in the way"
    return f"Google Cloud Storage does not answer as it should: {text}"


def raise_failure(error: BaseException) -> None:
    """Raises an error again where it says that the storage failed to answer.

    For what reports other errors as mistakes of the user's.
    """
    if failure(error) is not None:
        raise error


@functools.cache
def file_system() -> Any:
    """Returns fsspec's view of Google Cloud Storage."""
    import fsspec

    return fsspec.filesystem("gcs")


def upload(file: Path, target: Path) -> None:
    """Replaces an object by the content of a local file."""
    file_system().put_file(str(file), str(target))


def download(source: Path, file: Path) -> None:
    """Copies an object to a local file."""
    file_system().get_file(str(source), str(file))


def check_bucket(path: Path) -> None:
    """Refuses a remote path whose bucket is not there; what is in no bucket looks just missing."""
    if not is_remote(path):
        return
    bucket = str(path).removeprefix(REMOTE).partition("/")[0]
    try:
        file_system().call("GET", "b/{}/o", bucket, maxResults=1)
    except FileNotFoundError:
        raise UserError(
            f"{path}: there is no bucket {bucket!r}.  Correct the name, or make it: gcloud storage "
            f"buckets create {REMOTE}{bucket}."
        ) from None


class ConditionalObject:
    """Writes and removes an object only if nobody else wrote it since it was last read here."""

    def __init__(self, path: Path):
        from google.api_core import exceptions
        from google.cloud import storage

        check_bucket(path)
        self._conflicts = exceptions.PreconditionFailed, exceptions.NotFound
        bucket, _, name = str(path).removeprefix(REMOTE).partition("/")
        self._bucket, self._name = storage.Client().bucket(bucket), name
        self.generation = 0
        """Number of the write that made the object; 0 if it does not exist."""

    def read(self) -> str:
        """Returns the content; empty if the object does not exist."""
        content, self.generation = self._latest()
        return content

    def write(self, content: str) -> bool:
        """Writes the object; returns False where somebody else did first."""
        blob = self._bucket.blob(self._name)
        try:
            blob.upload_from_string(content, if_generation_match=self.generation)
            self.generation = blob.generation
            return True
        except self._conflicts:
            # A write whose answer was lost is made twice: then the first one is in the way.
            latest, generation = self._latest()
            is_ours = latest == content and generation != self.generation
            self.generation = generation if is_ours else self.generation
            return is_ours

    def remove(self) -> None:
        """Removes the object unless somebody else wrote it."""
        blob = self._bucket.blob(self._name)
        with contextlib.suppress(*self._conflicts):
            blob.delete(if_generation_match=self.generation)

    def _latest(self) -> tuple[str, int]:
        while True:
            blob = self._bucket.get_blob(self._name)
            if blob is None:
                return "", 0
            generation = blob.generation  # the download changes it
            try:
                content = blob.download_as_bytes(if_generation_match=generation)
            except self._conflicts:
                continue  # it was replaced or removed meanwhile
            return content.decode("utf-8", "replace"), generation
