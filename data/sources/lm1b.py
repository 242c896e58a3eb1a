"""Reads the 1 Billion Word Benchmark from its own archive, without TFDS."""

import contextlib
import io
import re
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import zstandard
from pydantic import Field

from configs.errors import RunError, UserError
from configs.paths import path_of
from configs.spec import spec
from data.sources import text_files
from data.sources.compression import ByteFile, nearest, open_file, read_errors
from data.sources.text import SPLITS, Source
from data.storage import remote
from data.storage.files import FULL, describe_full

TOP = "1-billion-word-language-modeling-benchmark-r13output"
_LEGAL = f"{TOP}.tar.gz, whole, or the folder that it unpacks to."
TRAIN_SHARDS = tuple(range(1, 100))  # of 100: the held-out shards are made of the first
_TRAIN = "training-monolingual.tokenized.shuffled/news.en-{:05d}-of-00100"
_HELD_OUT = "heldout-monolingual.tokenized.shuffled/news.en.heldout-{:05d}-of-00050"
_SHARD = re.compile(
    "|".join(re.escape(name).replace(r"\{:05d\}", r"\d{5}") for name in (_TRAIN, _HELD_OUT))
)
Shard = Annotated[int, Field(ge=0, lt=50)]
NamedFile = tuple[str, ByteFile]


@spec
class Lm1b(Source):
    """Reads the 1 Billion Word Benchmark from its own archive: 99 shards to train on, and some of
    the 50 held-out ones."""

    archive: str = f"{TOP}.tar.gz"
    """Path of the archive, or of the folder that it unpacks to. An archive with shards out of order
    takes temporary space (TMPDIR), about as much as its own size."""
    validation: tuple[Shard, ...] = (1,)
    """Held-out shards to validate on, 0 to 49."""
    test: tuple[Shard, ...] = (0,)
    """Held-out shards to test on, 0 to 49.  Published perplexities are of shard 0."""

    def splits(self) -> tuple[str, ...]:
        return tuple(s for s in SPLITS if self._shards(s))

    def lines(self, split: str) -> Iterator[str]:
        """Yields the sentences shard by shard, by the numbers of the shards."""
        shards = sorted(set(self._shards(split)))
        with read_errors(self.archive):
            try:
                for name, file in self._in_order(shards, _shards_of(self.archive)):
                    lines = text_files.decoded_lines(file, name)
                    yield from (line for line in lines if line and not line.isspace())
            except tarfile.TarError as error:
                raise UserError(
                    f"Lm1b.archive = {self.archive!r}: is not a whole tar archive ({error}).  "
                    f"Legal: {_LEGAL}"
                ) from None

    def _in_order(
        self, shards: Sequence[str], stream: Iterator[tuple[str, NamedFile]]
    ) -> Iterator[NamedFile]:
        """Yields the name and the lines of each of these shards, in this order.

        Those that come too early wait in temporary files: an archive is read once.
        """
        missing = dict.fromkeys(shards)
        with contextlib.ExitStack() as stack:
            waiting: dict[str, NamedFile] = {}
            for shard in shards:
                while shard not in waiting:
                    arrived, (name, file) = next(stream, (None, ("", io.BytesIO())))
                    if arrived is None:
                        raise UserError(
                            f"Lm1b.archive = {self.archive!r}: {len(missing)} of {len(shards)} "
                            f"shards are missing, such as {next(iter(missing))}.  Legal: {_LEGAL}"
                        )
                    if arrived in missing:
                        del missing[arrived]
                        file = file if arrived == shard else stack.enter_context(copy(file))
                        waiting[arrived] = (name, file)
                    elif arrived in shards:
                        raise UserError(
                            f"Lm1b.archive = {self.archive!r}: shard {arrived} is in it twice.  "
                            f"Legal: {_LEGAL}"
                        )
                yield waiting.pop(shard)

    def bytes_to_read(self, split: str) -> int | None:
        return text_files.total_bytes(self._paths())

    def fingerprint(self) -> dict[str, Any] | None:
        paths = self._paths()
        is_folder = paths != [self.archive]
        order = {} if is_folder else {"order of shards": "by number"}  # once that of the archive
        try:
            return {"archive": text_files.stamps(paths), **order}
        except OSError as error:
            remote.raise_failure(error)
            return None

    def _paths(self) -> list[str]:
        """Returns the files of the folder, or the archive."""
        path = path_of(self.archive).expanduser()
        is_folder = path.is_dir()
        return sorted(map(str, path.glob("**/news.en*"))) if is_folder else [self.archive]

    def _shards(self, split: str) -> list[str]:
        """Names the shards of a split."""
        if split == "train":
            return [_TRAIN.format(shard) for shard in TRAIN_SHARDS]
        return [_HELD_OUT.format(shard) for shard in getattr(self, split)]


@contextlib.contextmanager
def copy(lines: ByteFile) -> Iterator[ByteFile]:
    """Keeps lines in a compressed temporary file, and yields what reads them."""
    with tempfile.TemporaryFile() as file:
        try:
            with zstandard.ZstdCompressor(level=1).stream_writer(file, closefd=False) as writer:
                for line in lines:
                    writer.write(line)
            file.seek(0)
        except OSError as error:
            if error.errno not in FULL:
                raise
            folder = Path(tempfile.gettempdir())
            raise RunError(
                f"{folder}: {describe_full(folder, error)}.  Shards that come too early in the "
                "archive wait there.  Remove files there, set TMPDIR to another folder, or unpack "
                "the archive and set Lm1b.archive to the folder."
            ) from error
        with zstandard.ZstdDecompressor().stream_reader(file, closefd=False) as reader:
            yield io.BufferedReader(reader)


def _shards_of(archive: str) -> Iterator[tuple[str, NamedFile]]:
    """Yields each shard, its name and its lines; an archive is read once, as a stream."""
    path = path_of(archive).expanduser()
    if path.is_dir():
        for file_path in sorted(path.glob("**/news.en*")):
            if shard := _shard(file_path.as_posix()):
                with open_file(str(file_path)) as file:
                    yield shard, (str(file_path), file)
    elif not path.exists():
        raise UserError(
            f"Lm1b.archive = {archive!r}: there is no such file.{nearest(archive)}  Legal: {_LEGAL}"
        )
    else:
        whole: Any
        with open_file(archive) as whole, tarfile.open(fileobj=whole, mode="r|") as tar:
            for member in tar:
                shard = _shard(member.name)
                content = tar.extractfile(member) if shard and member.isfile() else None
                if shard and content is not None:
                    yield shard, (f"{archive}, {member.name}", content)


def _shard(path: str) -> str | None:
    """Returns the name of a shard, given its path; None for other files."""
    match = _SHARD.search(path)
    return match[0] if match and match.end() == len(path) else None
