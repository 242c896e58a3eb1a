"""Makes paths of this machine and of Google Cloud Storage (gs://bucket/name)."""

import functools
import importlib.metadata
import os
import re
from pathlib import Path
from typing import cast

from configs.errors import UserError, brief, extra_required

REMOTE = "gs://"
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/+")


def path_of(name: str | os.PathLike[str]) -> Path:
    """Returns the path of a name; a gs:// path has the methods of pathlib's that are used here.

    Raises `UserError` for another scheme: `pathlib` would take it for a local folder.
    """
    text = os.fspath(name)
    match = _SCHEME.match(text)
    if match is None:
        return Path(name)
    if not text.startswith(REMOTE):
        raise UserError(
            f"{brief(text)}: {match[0]} is not supported.  "
            "Legal: a path of this machine, or gs://bucket/name."
        )
    if not re.match(r"gs://[^/]+/.", text):
        raise UserError(f"{brief(text)}: no name in a bucket.  Legal: gs://bucket/name.")
    _set_up()
    from etils import epath

    return cast(Path, epath.Path(text))


def is_remote(path: str | os.PathLike[str]) -> bool:
    """Returns whether a path lies in Google Cloud Storage."""
    return os.fspath(path).startswith(REMOTE)


def local_path(name: str | os.PathLike[str], what: str) -> Path:
    """Returns the path of something that only this machine can have; refuses a remote one."""
    path = path_of(name)
    if is_remote(path):
        raise UserError(f"{what} = {path}: it cannot be remote.  Give a path of this machine.")
    return path


def absolute(path: Path) -> Path:
    """Returns the path from the root; a remote one is."""
    return path if is_remote(path) else path.absolute()


@functools.cache
def _set_up() -> None:
    """Checks that gcsfs is installed; lets it forget listings, which other processes change."""
    with extra_required("gcs", "a gs:// path"):
        importlib.metadata.version("gcsfs")
    import fsspec

    fsspec.config.conf.setdefault("gcs", {})["use_listings_cache"] = False
