"""Reads the 1 Billion Word Benchmark from its own archive, without TFDS."""

import contextlib
import re
import tarfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from configs.errors import UserError
from configs.paths import path_of
from configs.spec import spec
from data.sources import text_files
from data.sources.compression import nearest, open_file, read_errors
from data.sources.text import SPLITS, Source

TOP = "1-billion-word-language-modeling-benchmark-r13output"
TRAIN_SHARDS = tuple(range(1, 100))  # of 100: the held-out shards are made of the first
_SHARD = re.compile(
    r"training-monolingual\.tokenized\.shuffled/news\.en-(?P<train>\d{5})-of-00100"
    r"|heldout-monolingual\.tokenized\.shuffled/news\.en\.heldout-(?P<held_out>\d{5})-of-00050"
)
Shard = Annotated[int, Field(ge=0, lt=50)]
Key = tuple[str, int]


@spec
class Lm1b(Source):
    """Reads the 1 Billion Word Benchmark from its own archive: 99 shards to train on, and some of
    the 50 held-out ones."""

    archive: str = f"{TOP}.tar.gz"
    """Path of the archive, or of the folder that it unpacks to."""
    validation: tuple[Shard, ...] = (1,)
    """Held-out shards to validate on, 0 to 49."""
    test: tuple[Shard, ...] = (0,)
    """Held-out shards to test on, 0 to 49.  Published perplexities are of shard 0."""

    def splits(self) -> tuple[str, ...]:
        return tuple(s for s in SPLITS if self._shards(s))

    def lines(self, split: str) -> Iterator[str]:
        """Yields the sentences shard by shard, in the order of the archive."""
        missing = dict.fromkeys(self._shards(split))
        with _archive_errors(self.archive):
            for key, name, file in _shards_of(self.archive):
                if key in missing:
                    del missing[key]
                    lines = text_files.decoded_lines(file, name)
                    yield from (line for line in lines if line and not line.isspace())
                if not missing:
                    return
        raise UserError(
            f"Lm1b.archive = {self.archive!r}: {len(missing)} of {len(self._shards(split))} shards "
            f"are missing, such as {_name(*next(iter(missing)))}.  Legal: {TOP}.tar.gz, whole, or "
            "the folder that it unpacks to."
        )

    def fingerprint(self) -> dict[str, Any] | None:
        path = path_of(self.archive).expanduser()
        paths = sorted(map(str, path.glob("**/news.en*"))) if path.is_dir() else [self.archive]
        try:
            return {"archive": text_files.stamps(paths)}
        except OSError:
            return None

    def _shards(self, split: str) -> list[Key]:
        if split == "train":
            return [("train", shard) for shard in TRAIN_SHARDS]
        return [("held_out", shard) for shard in getattr(self, split)]


def _name(kind: str, shard: int) -> str:
    if kind == "train":
        return f"training-monolingual.tokenized.shuffled/news.en-{shard:05d}-of-00100"
    return f"heldout-monolingual.tokenized.shuffled/news.en.heldout-{shard:05d}-of-00050"


@contextlib.contextmanager
def _archive_errors(archive: str) -> Iterator[None]:
    with read_errors(archive):
        try:
            yield
        except tarfile.TarError as error:
            raise UserError(
                f"Lm1b.archive = {archive!r}: is not a whole tar archive ({error}).  "
                f"Legal: {TOP}.tar.gz, or the folder that it unpacks to."
            ) from None


def _shards_of(archive: str) -> Iterator[tuple[Key, str, Iterable[bytes]]]:
    """Yields each shard, its name and its lines; an archive is read once, as a stream."""
    path = path_of(archive).expanduser()
    if path.is_dir():
        yield from _shards_in_folder(path)
    elif not path.exists():
        raise UserError(
            f"Lm1b.archive = {archive!r}: there is no such file.{nearest(archive)}  Legal: the "
            f"path of {TOP}.tar.gz, or of the folder that it unpacks to."
        )
    else:
        with open_file(archive) as file:
            yield from _shards_in_tar(archive, file)


def _shards_in_folder(folder: Path) -> Iterator[tuple[Key, str, Iterable[bytes]]]:
    for path in sorted(folder.glob("**/news.en*")):
        if key := _key(path.as_posix()):
            with open_file(str(path)) as file:
                yield key, str(path), file


def _shards_in_tar(archive: str, file: Any) -> Iterator[tuple[Key, str, Iterable[bytes]]]:
    with tarfile.open(fileobj=file, mode="r|") as tar:
        for member in tar:
            key, shard = _key(member.name), tar.extractfile(member) if member.isfile() else None
            if key and shard is not None:
                yield key, f"{archive}, {member.name}", shard


def _key(name: str) -> Key | None:
    match = _SHARD.search(name)
    if match is None or match.end() != len(name):
        return None
    kind = str(match.lastgroup)
    return kind, int(match[kind])
