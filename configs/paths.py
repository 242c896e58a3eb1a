"""Makes paths for local and remote storage (gs://bucket/name, s3://bucket/name).

hf://datasets/owner/name/file is a file on the Hugging Face Hub, which is read-only here.
"""

import functools
import importlib.metadata
import os
import re
from pathlib import Path
from typing import NamedTuple, cast

from configs.errors import UserError, brief, extra_required


class Storage(NamedTuple):
    """Describes a kind of remote storage.  `protocol` names it in fsspec, and names its extra."""

    protocol: str
    package: str
    missing: str
    """What to do if a bucket does not exist."""


STORAGES = {
    "gs": Storage("gcs", "gcsfs", "make it: gcloud storage buckets create gs://{bucket}"),
    "s3": Storage("s3", "s3fs", "make it: aws s3 mb s3://{bucket}"),
    "hf": Storage(
        "hf",
        "huggingface_hub",
        "set HF_TOKEN for a repository that is private, or whose terms you accepted on its page",
    ),
}
"""The kinds of remote storage, by the scheme of their paths."""
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/+")
_REMOTE = re.compile(rf"({'|'.join(STORAGES)})://")
_IN_BUCKET = re.compile(r"\w+://[\w.-]+/(?s:.+)", re.ASCII)
_ON_HUB = re.compile(r"hf://datasets/[\w.-]+/[\w.-]+(@[\w.-][^@]*)?/[^/@][^@]*", re.ASCII)
_LEGAL = "gs://bucket/name, s3://bucket/name or, to read, hf://datasets/owner/name/file"


def path_of(name: str | os.PathLike[str]) -> Path:
    """Returns the path for a name.  A remote path has the `pathlib` methods that Meshloom uses.

    Raises `UserError` for other schemes, which `pathlib` would treat as local folders.
    """
    text = os.fspath(name)
    match = _SCHEME.match(text)
    if match is None:
        if text.startswith("~") and os.path.expanduser(text) == text:
            raise UserError(f"{brief(text)}: no such user.  Legal: ~/name, or an absolute path.")
        return Path(name)
    if not is_remote(text):
        raise UserError(
            f"{brief(text)}: {match[0]} is not supported.  Legal: a path of this machine, {_LEGAL}."
        )
    if not (_ON_HUB if is_on_hub(text) else _IN_BUCKET).fullmatch(text):
        raise UserError(f"{brief(text)}: names no object in a bucket.  Legal: {_LEGAL}.")
    _set_up(text.partition(":")[0])
    from etils import epath

    return cast(Path, epath.Path(text))


def is_remote(path: str | os.PathLike[str]) -> bool:
    """Returns whether a path is in remote storage."""
    return _REMOTE.match(os.fspath(path)) is not None


def is_on_hub(path: str | os.PathLike[str]) -> bool:
    """Returns whether a path is on the Hugging Face Hub, which is read-only here."""
    return os.fspath(path).startswith("hf://")


def storage_of(path: str | os.PathLike[str]) -> Storage:
    """Returns the storage of a remote path."""
    return STORAGES[os.fspath(path).partition(":")[0]]


def in_bucket(path: str | os.PathLike[str]) -> tuple[str, str]:
    """Returns the bucket of a remote path, and the object's name in it."""
    bucket, _, name = os.fspath(path).partition("://")[2].partition("/")
    return bucket, name


def local_path(name: str | os.PathLike[str], what: str) -> Path:
    """Returns the path of something that must be on this machine; refuses a remote path."""
    path = path_of(name)
    if is_remote(path):
        raise UserError(f"{what} = {path}: it cannot be remote.  Give a path of this machine.")
    return path


def absolute(path: Path) -> Path:
    """Returns the absolute path; a remote path already is one."""
    return path if is_remote(path) else path.absolute()


@functools.cache
def _set_up(scheme: str) -> None:
    """Checks that the package is installed, and disables fsspec's cache of folder listings."""
    storage = STORAGES[scheme]
    with extra_required(storage.protocol, f"{scheme}://"):
        importlib.metadata.version(storage.package)
    import fsspec

    fsspec.config.conf.setdefault(storage.protocol, {})["use_listings_cache"] = False
