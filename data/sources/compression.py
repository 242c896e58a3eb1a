"""Opens plain, .gz, .xz and .zst files, and explains why one cannot be read."""

import contextlib
import contextvars
import io
import lzma
import os
import zlib
from collections.abc import Callable, Iterator
from typing import IO, Any

import zstandard

from configs.errors import UserError, did_you_mean
from configs.paths import is_remote, path_of
from data.storage import lookup, remote

ENDINGS = {b"\x1f\x8b": ".gz", b"\xfd7zXZ": ".xz", b"\x28\xb5\x2f\xfd": ".zst"}
"""Suffixes of compressed files, by their magic bytes."""
_BYTES_PER_READ = 1 << 17
_MAX_WINDOW_BYTES = 1 << 31  # of `zstd --ultra --long=31`, which published corpora use

_DECOMPRESSORS: dict[str, Callable[[], Any]] = {
    ".gz": lambda: zlib.decompressobj(16 + zlib.MAX_WBITS),  # expects a gzip header
    ".xz": lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ),
    ".zst": lambda: zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES).decompressobj(),
}


def open_file(name: str) -> io.BufferedReader:
    """Opens a local or remote file to read its decompressed content."""
    path = path_of(name).expanduser()
    try:
        file = lookup.open_to_read(name, path)
        if counter := _BYTES_READ.get():
            counter.follow(file, lookup.size_of(path))
        if new_frame := _DECOMPRESSORS.get(path.suffix):
            return io.BufferedReader(_Frames(file, new_frame), _BYTES_PER_READ)
        return file
    except OSError as error:
        remote.raise_failure(error)
        reason = error.strerror or "there is no such file"
        hint = nearest(name) if isinstance(error, FileNotFoundError) else ""
        raise UserError(f"{name}: cannot be opened: {reason}.{hint}") from None


class BytesRead:
    """Counts the bytes read from files; in an open file, those before its position."""

    def __init__(self) -> None:
        self._bytes, self._open = 0, list[tuple[Any, int]]()

    def add(self, count: int) -> None:
        """Adds bytes of a file that is not followed."""
        self._bytes += count

    def follow(self, file: Any, size: int) -> None:
        """Follows an open file; once it is closed, all its bytes count as read."""
        self.total()
        self._open.append((file, size))

    def total(self) -> int:
        """Returns the number of bytes read so far."""
        self._bytes += sum(size for file, size in self._open if file.closed)
        self._open = [(file, size) for file, size in self._open if not file.closed]
        return self._bytes + sum(file.tell() for file, _ in self._open)


_BYTES_READ = contextvars.ContextVar[BytesRead | None]("bytes read", default=None)


@contextlib.contextmanager
def counted_bytes() -> Iterator[BytesRead]:
    """Counts the bytes that are read from files within the context."""
    token = _BYTES_READ.set(BytesRead())
    try:
        yield bytes_read()
    finally:
        _BYTES_READ.reset(token)


def bytes_read() -> BytesRead:
    """Returns the counter of the context; without one, a counter that nothing reads."""
    return _BYTES_READ.get() or BytesRead()


@contextlib.contextmanager
def read_errors(path: str) -> Iterator[None]:
    """Names the file in errors that occur while it is read."""
    try:
        yield
    except (EOFError, OSError) as error:
        remote.raise_failure(error)
        raise UserError(
            f"{path}: cannot be read to its end ({error}).  Copy or compress it again."
        ) from None


def nearest(path: str) -> str:
    """Suggests a file with a name similar to the one that cannot be opened."""
    if is_remote(path):
        return ""
    folder, name = os.path.split(os.path.expanduser(path))
    while folder and not os.path.isdir(folder):
        folder, name = os.path.split(folder)
    names = list[str]()
    with contextlib.suppress(OSError):  # an unreadable folder
        names = [other for other in os.listdir(folder or ".") if other != name]
    hint = did_you_mean(name, names)
    return f"{hint}  (in {folder or 'this folder'})" if hint else ""


class _Frames(io.RawIOBase):
    """Decompresses one frame after another: .gz members, or .xz streams with zeros between.

    The libraries' own readers accept a truncated .zst as complete, ignore what follows a damaged
    header within a .xz, and leave the file of a .gz open.
    """

    def __init__(self, file: IO[bytes], new_frame: Callable[[], Any]):
        self._file, self._rest, self._new_frame = file, b"", new_frame
        self._frame, self._in_frame = new_frame(), False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._rest:
            raw = self._file.read(_BYTES_PER_READ)
            if not raw:
                if self._in_frame:
                    raise EOFError("compressed file ended before the end of its stream")
                return 0
            self._rest = self._decompressed(raw)
        text, self._rest = self._rest[: len(buffer)], self._rest[len(buffer) :]
        buffer[: len(text)] = text
        return len(text)

    def close(self) -> None:
        self._file.close()
        super().close()

    def _decompressed(self, raw: bytes) -> bytes:
        texts = []
        while raw := raw if self._in_frame else raw.lstrip(b"\0"):
            try:
                texts.append(self._frame.decompress(raw))
            except (lzma.LZMAError, zlib.error, zstandard.ZstdError) as error:
                raise OSError(str(error)) from None  # tarfile replaces other types
            raw, self._in_frame = self._frame.unused_data, not self._frame.eof
            if self._frame.eof:
                self._frame = self._new_frame()
        return b"".join(texts)
