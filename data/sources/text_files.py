"""Reads the lines of text files, and describes what is wrong with a file."""

import codecs
import contextvars
import logging
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import IO, TypeVar

from configs.errors import UserError
from configs.paths import absolute, is_remote, path_of
from data.sources.compression import ENDINGS, nearest, open_file, read_errors
from data.storage import lookup

T = TypeVar("T")

logger = logging.getLogger(__name__)

_UTF16_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
LONE_SURROGATE = re.compile("[\ud800-\udfff]")  # bytes that are not UTF-8 become these
MAX_LINE_BYTES = 1 << 26
"""Limit of one line; longer ones are not text, or would fill the memory."""
POINTER = b"version https://git-lfs"  # what Git LFS leaves in place of a file
PARQUET_MARK = b"PAR1"
ARROW_MARKS = (b"ARROW1", b"\xff\xff\xff\xff")  # of a file, and of a stream
PLACE = contextvars.ContextVar[tuple[str, int] | None]("place", default=None)
"""File, and number of the line, record or row, of the example that a source yielded last; None if
unknown.  Examples are plain strings and pairs, so their place is passed beside them.  Code that
passes examples on must draw one at a time."""
_LINE_BREAKS = re.compile(r"[\n\r]")  # for programs that read lines, as Python's open does


def expand(patterns: str | Sequence[str], setting: str) -> list[str]:
    """Returns the files that paths or globs name, sorted within each pattern, each once."""
    return distinct(named(patterns, setting))


def distinct(paths: Iterable[str]) -> list[str]:
    """Returns one path for each distinct file: the first one."""
    files: dict[str, str] = {}
    for path in paths:
        files.setdefault(identity(path), path)
    return list(files.values())


def identity(path: str) -> str:
    """Returns a key that "a.txt", "./a.txt" and a link to it share."""
    return path if is_remote(path) else os.path.realpath(path)


def named(patterns: str | Sequence[str], setting: str) -> list[str]:
    """Returns the files that paths or globs name, sorted within each pattern."""
    files = list[str]()
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        matches = lookup.matches(pattern)
        if not matches:
            raise UserError(f"{setting}: no file matches {pattern!r}.{nearest(pattern)}")
        for path in matches:
            if path_of(path).is_dir():
                inside = sorted(p for depth in ("*", "*/*") for p in path_of(path).glob(depth))
                ends = [os.path.join(p.parent, f"*{p.suffix}") for p in inside if p.is_file()]
                # Arrow files have .json files next to them; of equal counts, the last are deeper.
                arrow = [end for end in ends if end.endswith(".arrow")]
                any_text = [os.path.join(path, "*.txt")]
                example = max(reversed(arrow or ends or any_text), key=ends.count)
                raise UserError(
                    f"{setting}: {path!r} is a folder.  Name its files, such as {example!r}."
                )
            if not is_remote(path) and path_of(path).is_fifo():
                raise UserError(
                    f"{setting}: {path!r} is a pipe, but a task reads its text several times.  "
                    "Write the text to a file."
                )
            files.append(path)
    if not files:
        raise UserError(f"{setting} = {patterns!r}: names no file.  Give a path or a glob.")
    return files


def read_lines(path: str, errors: str = "strict") -> Iterator[str]:
    """Yields every line, split at "\\n" only: other Unicode separators belong to the text.

    A byte order mark at the start and a carriage return at the end of a line are not text.  errors
    is how `bytes.decode` handles bytes that are not UTF-8; with "surrogateescape" they stay in the
    line as lone surrogates.
    """
    return map(without_carriage_return, read_raw_lines(path, errors))


def without_carriage_return(line: str) -> str:
    """Returns a raw line without the carriage return at its end."""
    return line.removesuffix("\r")


def in_one_line(text: str) -> str:
    r"""Replaces line breaks with spaces, so that any program reads the text as one line."""
    return _LINE_BREAKS.sub(" ", text)


def read_raw_lines(path: str, errors: str = "strict") -> Iterator[str]:
    """Yields every line like `read_lines`, but keeps a carriage return at its end."""
    with open_file(path) as file, read_errors(path):
        yield from decoded_lines(file, path, errors)


def decoded_lines(file: IO[bytes], name: str, errors: str = "strict") -> Iterator[str]:
    """Yields the lines of an open file, as `read_raw_lines` does for a path."""
    for number, raw in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES + 1), b""), 1):
        if len(raw) > MAX_LINE_BYTES:
            raise UserError(
                f"{name}, line {number}: is longer than {MAX_LINE_BYTES:,} bytes, the limit of a "
                "line.  Split it into several lines."
            )
        if number == 1 and raw.startswith(POINTER):
            raise UserError(f"{name}: a pointer of Git LFS.  `git lfs pull` fetches the file.")
        try:
            line = raw.decode("utf-8-sig" if number == 1 else "utf-8", errors)
        except UnicodeDecodeError as error:
            raise UserError(_not_utf8(name, number, raw, error)) from None
        yield line.removesuffix("\n")


def decoded(raw: object, place: str, errors: str = "strict", remedy: str = "") -> str:
    """Decodes the text of a record; `place` names the record in an error."""
    if not isinstance(raw, bytes):
        raise UserError(f"{place}: found {type(raw).__name__}, legal: text.{remedy}")
    try:
        return raw.decode("utf-8", errors)
    except UnicodeDecodeError as error:
        raise UserError(
            f"{place}: byte {error.start + 1} is {raw[error.start]:#04x}, not UTF-8.{remedy}"
        ) from None


def of_files(
    paths: Sequence[str], contents: Iterable[Iterable[T | None]], setting: str, kind: str
) -> Iterator[T]:
    """Yields the items of each file of a setting; a file with only blank lines counts as empty.

    None stands for a line or record that is not an example.

    Raises `UserError` if all files are empty; if only some are, as shards may be, logs how many.
    """
    empty = []
    for path, content in zip(paths, contents, strict=True):
        is_empty = True
        for number, item in enumerate(content, 1):
            if item is not None:
                is_empty = is_empty and isinstance(item, str) and not item.strip()
                PLACE.set((path, number))
                yield item
        empty += [path] if is_empty else []
    if len(empty) == 1 == len(paths):
        raise UserError(f"{setting}: {empty[0]} is empty: it has no {kind}.")
    if len(empty) == len(paths):
        raise UserError(
            f"{setting}: all {len(paths):,} files are empty, such as {empty[0]}: they have no "
            f"{kind}."
        )
    if empty:
        logger.info(
            "%s: %d of %d files are empty, such as %s", setting, len(empty), len(paths), empty[0]
        )


def with_text(texts: Iterable[str], setting: str, kind: str) -> Iterator[str]:
    """Yields the texts that are not blank.  Logs how many are blank; raises if all are."""
    total = blank = 0
    for total, text in enumerate(texts, 1):  # noqa: B007
        if text.strip():
            yield text
        else:
            blank += 1
    if blank == total:
        raise UserError(f"{setting}: there is no text in {total:,} {kind}s.")
    if blank:
        logger.info("%s: %d of %d %ss have no text and are left out", setting, blank, total, kind)


def stamps(paths: Sequence[str]) -> dict[str, list[int]]:
    """Returns the size and modification time of each file, a cheap fingerprint of its content."""
    files = [path_of(path).expanduser() for path in paths]
    return {str(absolute(file)): lookup.version(file) for file in files}


def _not_utf8(path: str, number: int, raw: bytes, error: UnicodeDecodeError) -> str:
    if number == 1 and raw.startswith((PARQUET_MARK, *ARROW_MARKS)):
        return f"{path}: is Parquet or Arrow.  @TableText() and @Table() read such files."
    for magic, ending in ENDINGS.items():
        if number == 1 and raw.startswith(magic):
            return f"{path}: is not text but compressed.  Rename it so that it ends in {ending}."
    if number == 1 and raw.startswith(b"BZh"):
        return f"{path}: is compressed as .bz2.  Legal: plain text, {', '.join(ENDINGS.values())}."
    encoding = "utf-16" if number == 1 and raw[:2] in _UTF16_MARKS else "latin1"
    shown = raw[max(0, error.start - 12) : error.start + 4]
    return (
        f"{path}, line {number}: byte {error.start + 1} is {raw[error.start]:#04x}, not UTF-8 "
        f"(near {shown!r}).  Convert the file, such as: iconv -f {encoding} -t utf-8."
    )
