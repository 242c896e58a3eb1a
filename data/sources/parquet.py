"""Reads text and pairs from Parquet files, some rows at a time."""

import contextlib
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from configs.errors import UserError, brief, did_you_mean
from configs.paths import path_of
from configs.spec import spec
from data.sources import text_files
from data.sources.compression import bytes_read
from data.sources.pair_kinds import FilePairs
from data.sources.pairs import Pair
from data.sources.text import FileText
from data.storage import lookup, remote

if TYPE_CHECKING:
    import pyarrow

_ROWS_PER_READ = 1024
_BYTES_PER_READ = 1 << 20  # without it a whole column of a row group is read at once


@spec
class ParquetText(FileText):
    """Reads Parquet files; a column holds the text."""

    column: str = "text"
    """Name of the column; "page.text" is the field text of the column page."""

    has_newlines = True

    def read_files(self, paths: Sequence[str], setting: str, errors: str) -> Iterator[str]:
        texts = (text for [text] in rows(paths, [self.column], setting, errors))
        return text_files.with_text(texts, setting, "row")


@spec
class Parquet(FilePairs):
    """Reads Parquet files; two columns make a pair."""

    source_column: str
    """Name of the column to translate; "translation.de" is the field de of the column
    translation."""
    target_column: str
    """Name of the column that holds the translation."""

    def read_files(self, paths: Sequence[str], setting: str, errors: str) -> Iterator[Pair]:
        columns = [self.source_column, self.target_column]
        return itertools.starmap(Pair, rows(paths, columns, setting, errors))


def rows(
    paths: Sequence[str], columns: Sequence[str], setting: str, errors: str
) -> Iterator[list[str]]:
    """Yields the texts of some columns, row by row."""
    read = functools.partial(_rows_of_file, columns=columns, setting=setting, errors=errors)
    return text_files.of_files(paths, map(read, paths), setting, "row")


def _rows_of_file(
    path: str, columns: Sequence[str], setting: str, errors: str
) -> Iterator[list[str]]:
    import pyarrow  # costs 0.1 s, which other sources need not pay
    from pyarrow import parquet

    file, number = path_of(path).expanduser(), 0
    try:
        with (
            lookup.open_to_read(path, file) as opened,
            parquet.ParquetFile(opened, buffer_size=_BYTES_PER_READ, pre_buffer=False) as table,
        ):
            fields = [_field(table.schema_arrow, column, path, setting) for column in columns]
            row_bytes = lookup.size_of(file) / max(table.metadata.num_rows, 1)
            for batch in table.iter_batches(_ROWS_PER_READ, columns=list(columns)):
                bytes_read().add(round(row_bytes * batch.num_rows))
                arrays = [_raw_texts(batch, field) for field in fields]
                for row in zip(*arrays, strict=True):
                    number += 1
                    place = f"{path}, row {number}"
                    named = zip(row, columns, strict=True)
                    yield [_text(raw, f"{place}: column {name!r}", errors) for raw, name in named]
    except (pyarrow.ArrowException, OSError) as error:
        remote.raise_failure(error)
        head = b""
        with contextlib.suppress(OSError), file.open("rb") as raw_file:
            head = raw_file.read(8)
        remedy = "  Copy it again."
        if head.startswith(text_files.ARROW_MARKS):
            remedy = f"  It is an Arrow file.{text_files.TO_PARQUET}"
        elif head and not head.startswith(text_files.PARQUET_MARK):
            remedy = "  It is not Parquet: another source reads it."
        first_line = brief(str(error).partition("\n")[0])
        raise UserError(
            f"{setting}: {path} cannot be read as Parquet ({first_line}).{remedy}"
        ) from None


def _field(schema: "pyarrow.Schema", column: str, path: str, setting: str) -> list[str]:
    """Returns the names that lead to the texts of a column."""
    import pyarrow

    names = [column] if column in schema.names else column.split(".")
    kind = pyarrow.struct(schema)
    for name in names:
        known = [field.name for field in kind] if pyarrow.types.is_struct(kind) else []
        if name not in known:
            raise UserError(
                f"{setting}: {path} has no column {column!r}.{did_you_mean(name, known)}  "
                f"Its columns: {brief(', '.join(known or schema.names))}."
            )
        kind = kind.field(name).type
    values = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
    if str(values) not in ("string", "large_string", "string_view"):
        raise UserError(
            f"{setting}: {path}, column {column!r}: found {brief(str(kind), 60)}, legal: string.  "
            f"Its columns: {brief(', '.join(schema.names))}."
        )
    return names


def _raw_texts(batch: "pyarrow.RecordBatch", field: Sequence[str]) -> list[bytes | None]:
    """Returns the texts of a column as bytes, which need not be UTF-8; None where one is null."""
    import pyarrow
    from pyarrow import compute

    array = batch.column(field[0])
    if len(field) > 1:
        array = compute.struct_field(array, field[1:])
    if pyarrow.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    raw: list[bytes | None] = array.cast(pyarrow.large_binary()).to_pylist()
    return raw


def _text(raw: bytes | None, place: str, errors: str) -> str:
    if raw is None:
        raise UserError(f"{place}: found null, legal: text.  Remove such rows.")
    return text_files.decoded(raw, place, errors, "  Write the column as UTF-8.")
