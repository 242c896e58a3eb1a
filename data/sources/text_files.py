"""Reads lines of plain, .gz and .xz text files, and says what is wrong with a file."""

import contextlib
import gzip
import lzma
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import IO, Any

from configs.errors import UserError, did_you_mean
from configs.paths import absolute, is_remote, path_of
from data import storage

LONE_SURROGATE = re.compile("[\ud800-\udfff]")  # what stands for bytes that are not UTF-8


def expand(patterns: str | Sequence[str], setting: str) -> list[str]:
    """Returns the files that paths or globs name, sorted within each pattern, none twice."""
    files: dict[str, None] = {}
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        matches = storage.matches(pattern)
        if not matches:
            raise UserError(f"{setting}: no file matches {pattern!r}.{_nearest(pattern)}")
        for path in matches:
            if path_of(path).is_dir():
                raise UserError(
                    f"{setting}: {path!r} is a folder.  "
                    f"Name its files, such as {path + '/*.txt'!r}."
                )
            files[path] = None
    return list(files)


def read_lines(path: str, errors: str = "strict") -> Iterator[str]:
    """Yields every line, split on "\\n" only: other Unicode separators belong to the text.

    A byte order mark at the start and a carriage return at a line's end are not text.  errors is
    what bytes.decode makes of bytes that are not UTF-8; with "surrogateescape" they stay in the
    line as lone surrogates.
    """
    return map(without_carriage_return, read_raw_lines(path, errors))


def without_carriage_return(line: str) -> str:
    """Returns the text of a raw line."""
    return line.removesuffix("\r")


def read_raw_lines(path: str, errors: str = "strict") -> Iterator[str]:
    """Yields every line as `read_lines` does, but with the carriage return at its end, if any."""
    with _open(path) as file, _read_errors(path):
        yield from decoded_lines(file, path, errors)


def decoded_lines(file: Iterable[bytes], name: str, errors: str = "strict") -> Iterator[str]:
    """Yields the lines of an open file as `read_raw_lines` does those of a named one."""
    for number, raw in enumerate(file, 1):
        try:
            line = raw.decode("utf-8-sig" if number == 1 else "utf-8", errors)
        except UnicodeDecodeError as error:
            raise UserError(_not_utf8(name, number, raw, error)) from None
        yield line.removesuffix("\n")


def read_examples(paths: Sequence[str], setting: str) -> Iterator[str]:
    """Yields the raw lines of some files that hold more than white space."""
    for path in paths:
        empty = True
        for line in read_raw_lines(path):
            if line and not line.isspace():
                empty = False
                yield line
        if empty:
            raise UserError(f"{setting}: {path} is empty: it has no line of text.")


def stamps(paths: Sequence[str]) -> dict[str, list[int]]:
    """Returns size and time of change of each file, a cheap fingerprint of its content."""
    return {str(absolute(path_of(path))): storage.version(path_of(path)) for path in paths}


def _open(name: str) -> IO[bytes] | gzip.GzipFile:
    path = path_of(name)
    try:
        file: Any = path.open("rb") if is_remote(path) else path
        match path.suffix:
            case ".gz":
                return gzip.open(file, "rb")
            case ".xz":
                return lzma.open(file, "rb")
            case _:
                return open(path, "rb") if file is path else file
    except OSError as error:
        reason = error.strerror or "there is no such file"
        raise UserError(f"{name}: cannot be opened: {reason}.{_nearest(name)}") from None


@contextlib.contextmanager
def _read_errors(path: str) -> Iterator[None]:
    try:
        yield
    except (EOFError, OSError, lzma.LZMAError, zlib.error) as error:
        raise UserError(
            f"{path}: cannot be read to its end ({error}).  Copy or compress it again."
        ) from None


def _not_utf8(path: str, number: int, raw: bytes, error: UnicodeDecodeError) -> str:
    shown = raw[max(0, error.start - 12) : error.start + 4]
    return (
        f"{path}, line {number}: byte {error.start + 1} is {raw[error.start]:#04x}, not UTF-8 "
        f"(near {shown!r}).  Convert the file, such as: iconv -f latin1 -t utf-8."
    )


def _nearest(path: str) -> str:
    if is_remote(path):
        return ""
    folder, name = os.path.split(os.path.expanduser(path))
    while folder and not os.path.isdir(folder):
        folder, name = os.path.split(folder)
    names = os.listdir(folder or ".")
    hint = did_you_mean(name, names)
    return f"{hint}  (in {folder or 'this folder'})" if hint else ""
