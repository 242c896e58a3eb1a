"""Grows the files of a remote folder on this machine, and uploads them."""

import tempfile
from pathlib import Path
from typing import Self

from configs.paths import is_remote
from data.storage import remote


class WorkingFolder:
    """Holds a folder in which files can grow: the target, or for a remote one a temporary folder of
    this machine, from which they are uploaded.
    """

    def __init__(self, target: Path):
        self._target = target
        self._uploaded: dict[str, tuple[int, int]] = {}
        self._temporary = (
            tempfile.TemporaryDirectory(prefix="meshloom-") if is_remote(target) else None
        )
        self.path = target if self._temporary is None else Path(self._temporary.name)

    def fetch(self, *names: str) -> None:
        """Brings those of these files that are there."""
        for name in names if self._temporary is not None else ():
            if (self._target / name).exists():
                remote.download(self._target / name, self.path / name)

    def upload(self) -> None:
        """Uploads the files that changed since the last time; of a local folder does nothing."""
        for file in sorted(self.path.rglob("*")) if self._temporary is not None else ():
            name = str(file.relative_to(self.path))
            try:
                state = file.stat()
                version = (state.st_size, state.st_mtime_ns)
                if file.is_file() and self._uploaded.get(name) != version:
                    remote.upload(file, self._target / name)
                    self._uploaded[name] = version
            except FileNotFoundError:  # removed meanwhile, or a link to nothing
                if file.exists():
                    raise

    def close(self) -> None:
        """Uploads what changed, and removes the temporary folder."""
        try:
            self.upload()
        finally:
            if self._temporary is not None:
                self._temporary.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is None:
            self.close()
        elif self._temporary is not None:
            self._temporary.cleanup()
