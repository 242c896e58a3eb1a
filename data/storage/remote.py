"""Reads and writes objects in remote storage, and explains its errors.

An object is written and replaced as a whole.  It cannot grow, be renamed, locked or memory-mapped;
the other modules of this folder have substitutes.
"""

import contextlib
import functools
import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from configs.errors import UserError, brief, one_line
from configs.paths import in_bucket, is_on_hub, is_remote, storage_of

# gcsfs also raises what it logs as an error with a traceback.
logging.getLogger("gcsfs").setLevel(logging.CRITICAL)

_LIBRARIES = {
    "gcsfs", "fsspec", "google", "aiohttp", "requests", "s3fs", "botocore", "aiobotocore",
    "huggingface_hub", "httpx", "httpx2",
}  # fmt: skip
_Requests = tuple[Callable[[str, str], str], Callable[[str], object]]
"""Writes content over a version and returns the new version; removes a version."""
_PAGE = re.compile(r"(?is)<(!doctype )?html(.*?<title>(?P<title>.*?)</title>)?")
_UNREACHABLE = ("UNAVAILABLE", "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED", "UNAUTHENTICATED",
                "PERMISSION_DENIED")  # fmt: skip
"""Prefixes of TensorStore's errors after its retries have failed."""
_BEGINNINGS = ("Forbidden: ", "Invalid endpoint: ", "Consistency check failed: ")
"""Prefixes of errors of built-in types: from s3fs, and from a download that ended early."""


def failure(error: BaseException) -> str | None:
    """Describes how a storage request failed; returns None for other errors."""
    is_missing = isinstance(error, FileNotFoundError | FileExistsError)
    # s3fs raises OSError from botocore's error.
    causes = [error, *([error.__cause__] if isinstance(error, OSError) and not is_missing else [])]
    libraries = {type(cause).__module__.partition(".")[0] for cause in causes}
    is_of_tensorstore = any(str(error).startswith(word) for word in _UNREACHABLE)
    is_of_request = str(error).startswith(_BEGINNINGS)
    page = _PAGE.search(error.doc if isinstance(error, json.JSONDecodeError) else str(error))
    is_page = isinstance(error, json.JSONDecodeError) and page is not None
    if not (libraries & _LIBRARIES or is_of_tensorstore or is_of_request or is_page):
        return None
    text = one_line(error)
    if re.search(r"(?i)forbidden|denied", text):
        text += "  (check the credentials and their permissions)"
    if page is not None:
        title = brief(" ".join((page["title"] or "without a title").split()))
        text = f"the answer is a web page ({title}); a proxy or a sign-in page may be in the way"
    return f"unexpected answer from the remote storage: {text}"


def raise_failure(error: BaseException) -> None:
    """Raises an error again if it says that a storage request failed.

    For code that reports other errors as the user's mistakes.
    """
    if failure(error) is not None:
        raise error


def is_offline(error: BaseException) -> bool:
    """Returns whether the Hub was not contacted because HF_HUB_OFFLINE is set."""
    return type(error).__name__ == "OfflineModeIsEnabled"


def file_system(path: str | Path) -> Any:
    """Returns the fsspec file system for a path."""
    import fsspec

    return fsspec.filesystem(storage_of(path).protocol)


def version_in(info: dict[str, Any]) -> str:
    """Returns the number of an object's last write; for S3 and the Hub, a hash of its content."""
    return str(next(info[name] for name in ("generation", "ETag", "blob_id") if name in info))


def upload(file: Path, target: Path) -> None:
    """Replaces an object with the content of a local file."""
    check_writable(target)
    file_system(target).put_file(str(file), str(target))


def download(source: Path, file: Path) -> None:
    """Copies an object to a local file."""
    file_system(source).get_file(str(source), str(file))


def from_hub(path: Path) -> Path:
    """Downloads a file from the Hub to the cache of `huggingface_hub`; returns its path there."""
    import huggingface_hub
    from huggingface_hub.errors import RemoteEntryNotFoundError

    files = file_system(path)
    place = files.resolve_path(str(path))
    try:
        return Path(
            huggingface_hub.hf_hub_download(
                place.repo_id, place.path_in_repo, repo_type=place.repo_type,
                revision=place.revision, endpoint=files.endpoint,
            )
        )  # fmt: skip
    except RemoteEntryNotFoundError:
        raise UserError(f"{path}: there is no such file.") from None


def check_writable(path: Path) -> None:
    """Raises `UserError` for a path in read-only storage."""
    if is_on_hub(path):
        raise UserError(f"{path}: hf:// is read-only.  Legal: gs://, s3:// or a local path.")


def check_bucket(path: Path) -> None:
    """Refuses a remote path whose bucket is missing: its objects would just look missing."""
    if not is_remote(path):
        return
    storage, (bucket, _) = storage_of(path), in_bucket(path)
    try:
        if storage.protocol == "s3":
            file_system(path).call_s3("list_objects_v2", Bucket=bucket, MaxKeys=1)
        elif is_on_hub(path):
            file_system(path).resolve_path(str(path))
            with contextlib.suppress(FileNotFoundError):  # other errors look like one until here
                file_system(path).info(str(path))
        else:
            file_system(path).call("GET", "b/{}/o", bucket, maxResults=1)
    except FileNotFoundError:
        what = "such repository or revision" if is_on_hub(path) else f"bucket {bucket!r}"
        remedy = storage.missing.format(bucket=bucket)
        raise UserError(f"{path}: there is no {what}.  Correct the name, or {remedy}.") from None


class ConditionalObject:
    """Writes and removes an object only if nobody else wrote it since it was last read here."""

    def __init__(self, path: Path):
        check_writable(path)
        check_bucket(path)
        self._path, self._files = str(path), file_system(path)
        requests = _s3_requests if storage_of(path).protocol == "s3" else _gcs_requests
        self._put, self._delete = requests(path)
        self.version = ""
        """Identifies the write that made the object; empty if the object does not exist."""

    def read(self) -> str:
        """Returns the content; empty if the object does not exist."""
        content, self.version = self._latest()
        return content

    def write(self, content: str) -> bool:
        """Writes the object; returns False if somebody else wrote it first."""
        try:
            self.version = self._put(content, self.version)
            return True
        except Exception as error:
            _raise_others(error)
            # A write is repeated if its response was lost; then the first attempt is in the way.
            latest, version = self._latest()
            is_ours = latest == content and version != self.version
            self.version = version if is_ours else self.version
            return is_ours

    def remove(self) -> None:
        """Removes the object unless somebody else has written it."""
        try:
            if self._latest()[1] == self.version:  # some servers ignore the condition
                self._delete(self.version)
        except Exception as error:
            _raise_others(error)

    def _latest(self) -> tuple[str, str]:
        while True:
            try:
                version = version_in(self._files.info(self._path))
                content = self._files.cat_file(self._path)
                if version_in(self._files.info(self._path)) == version:
                    return content.decode("utf-8", "replace"), version
            except FileNotFoundError:
                return "", ""


def _gcs_requests(path: Path) -> _Requests:
    from google.cloud import storage

    bucket, name = in_bucket(path)
    objects = storage.Client().bucket(bucket)

    def put(content: str, version: str) -> str:
        blob = objects.blob(name)
        blob.upload_from_string(content, if_generation_match=int(version or 0))
        return str(blob.generation)

    return put, lambda version: objects.blob(name).delete(if_generation_match=int(version))


def _s3_requests(path: Path) -> _Requests:
    bucket, name = in_bucket(path)
    call = functools.partial(file_system(path).call_s3, Bucket=bucket, Key=name)

    def put(content: str, version: str) -> str:
        condition = {"IfMatch": version} if version else {"IfNoneMatch": "*"}
        return str(call("put_object", Body=content.encode(), **condition)["ETag"])

    return put, lambda version: call("delete_object", IfMatch=version)


def _raise_others(error: Exception) -> None:
    """Raises an error again unless it means that a condition did not hold."""
    status = getattr(error, "code", None)  # of Google's client; s3fs raises from botocore's error
    if status is None and error.__cause__ is not None:
        response = getattr(error.__cause__, "response", None) or {}
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    if status not in (404, 412):
        raise error
