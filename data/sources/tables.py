"""Reads text and pairs from columns of Parquet, Arrow and CSV files, some rows at a time."""

import contextlib
import csv
import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from configs.errors import UserError, brief, did_you_mean
from configs.paths import path_of
from configs.spec import spec
from data.sources import text_files
from data.sources.compression import bytes_read, open_file, read_errors
from data.sources.pair_kinds import FilePairs, Preferences
from data.sources.pairs import Pair
from data.sources.text import FileText
from data.sources.text_files import ARROW_MARKS, PARQUET_MARK
from data.storage import lookup, remote

if TYPE_CHECKING:
    import pyarrow

_ROWS_PER_READ = 1024
_BYTES_PER_READ = 1 << 20  # otherwise a whole column of a row group is read at once
_CSV_BLOCK = 1 << 24  # a row must fit into it
Batches = tuple["pyarrow.Schema", Iterable["pyarrow.RecordBatch"]]


@spec
class TableText(FileText):
    """Reads Parquet, Arrow and CSV files (.csv, also .gz, .xz or .zst); a column holds the text."""

    column: str = "text"
    """Name of the column; "page.text" selects field text of column page."""

    has_newlines = True

    def read_files(self, paths: Sequence[str], setting: str, errors: str) -> Iterator[str]:
        texts = (text for [text] in rows(paths, [self.column], setting, errors))
        return text_files.with_text(texts, setting, "row")


@spec
class Table(FilePairs):
    """Reads Parquet, Arrow and CSV files (.csv, also .gz, .xz or .zst); two columns make a pair."""

    source_column: str
    """Name of the column to translate; "translation.de" selects field de of column translation."""
    target_column: str
    """Name of the column that holds the translation."""

    def read_files(self, paths: Sequence[str], setting: str, errors: str) -> Iterator[Pair]:
        columns = [self.source_column, self.target_column]
        return itertools.starmap(Pair, rows(paths, columns, setting, errors))


def rows(
    paths: Sequence[str], columns: Sequence[str], setting: str, errors: str
) -> Iterator[list[str]]:
    """Yields the texts of some columns, row by row."""
    read = functools.partial(_rows_of, columns=columns, setting=setting, errors=errors)
    return text_files.of_files(paths, map(read, paths), setting, "row")


def _rows_of(path: str, columns: Sequence[str], setting: str, errors: str) -> Iterator[list[str]]:
    import pyarrow  # takes 0.1 s: only if needed

    number, head = 0, b""
    with contextlib.suppress(OSError), path_of(path).expanduser().open("rb") as file:
        head = file.read(8)
    is_csv = ".csv" in path_of(path.lower()).suffixes
    open_table = _csv if is_csv else _arrow if head.startswith(ARROW_MARKS) else _parquet
    try:
        with open_table(path, columns) as (schema, batches):
            fields = [_field(schema, column, path, setting) for column in columns]
            for batch in batches:
                arrays = [_raw_texts(batch, field) for field in fields]
                for row in zip(*arrays, strict=True):
                    number += 1
                    place = f"{path}, row {number}"
                    named = zip(row, columns, strict=True)
                    yield [_text(raw, f"{place}: column {name!r}", errors) for raw, name in named]
    except (pyarrow.ArrowException, OSError, csv.Error) as error:
        remote.raise_failure(error)
        remedy = "  Mend this row." if is_csv else "  Copy it again."
        if not is_csv and head and not head.startswith((PARQUET_MARK, *ARROW_MARKS)):
            remedy = "  It is none of these: another source reads it."
        first_line = brief(str(error).partition("\n")[0])
        raise UserError(
            f"{setting}: {path} cannot be read as Parquet, Arrow or .csv ({first_line}).{remedy}"
        ) from None


@contextlib.contextmanager
def _parquet(path: str, columns: Sequence[str]) -> Iterator[Batches]:
    from pyarrow import parquet

    file = path_of(path).expanduser()
    with (
        lookup.open_to_read(path, file) as opened,
        parquet.ParquetFile(opened, buffer_size=_BYTES_PER_READ, pre_buffer=False) as table,
    ):
        row_bytes = lookup.size_of(file) / max(table.metadata.num_rows, 1)

        def batches() -> Iterator["pyarrow.RecordBatch"]:
            for batch in table.iter_batches(_ROWS_PER_READ, columns=list(columns)):
                bytes_read().add(round(row_bytes * batch.num_rows))
                yield batch

        yield table.schema_arrow, batches()


@contextlib.contextmanager
def _arrow(path: str, columns: Sequence[str]) -> Iterator[Batches]:
    """Opens an Arrow file or stream, the formats of Hugging Face's data sets."""
    from pyarrow import ipc

    with open_file(path) as opened:
        if opened.peek(8).startswith(ARROW_MARKS[1]):
            stream = ipc.open_stream(opened)
            yield stream.schema, stream
        else:
            table = ipc.open_file(opened)
            yield table.schema, map(table.get_batch, range(table.num_record_batches))


@contextlib.contextmanager
def _csv(path: str, columns: Sequence[str]) -> Iterator[Batches]:
    """Opens a file whose first line names its columns, all of them strings."""
    import pyarrow

    with open_file(path) as opened, read_errors(path):
        names = next(csv.reader([opened.readline().decode("utf-8-sig", "replace")]), [])
        schema = pyarrow.schema([(name, pyarrow.string()) for name in names])
        if not opened.peek(1):
            yield schema, ()
            return
        from pyarrow import csv as arrow_csv

        table = arrow_csv.open_csv(
            opened,
            # Errors name the row only if a single thread reads.
            arrow_csv.ReadOptions(use_threads=False, column_names=names, block_size=_CSV_BLOCK),
            arrow_csv.ParseOptions(newlines_in_values=True),
            arrow_csv.ConvertOptions(column_types=schema, check_utf8=False),
        )
        yield schema, table


def _field(schema: "pyarrow.Schema", column: str, path: str, setting: str) -> list[str]:
    """Returns the names of the nested fields that lead to the texts of a column."""
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
        if known.count(name) > 1:
            raise UserError(
                f"{setting}: {path} has {known.count(name)} columns {name!r}.  Rename all but one."
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
    """Returns the texts of a column as bytes, which need not be UTF-8; None for a null."""
    import pyarrow
    from pyarrow import compute

    array = batch.column(field[0])
    if len(field) > 1:
        array = compute.struct_field(array, field[1:])
    if pyarrow.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    return array.cast(pyarrow.large_binary()).to_pylist()


def _text(raw: bytes | None, place: str, errors: str) -> str:
    if raw is None:
        raise UserError(f"{place}: found null, legal: text.  Remove such rows.")
    return text_files.decoded(raw, place, errors, "  Write the column as UTF-8.")


@spec
class TablePreferences(Preferences):
    """Reads preferences from Parquet, Arrow and CSV files (.csv, also .gz, .xz or .zst)."""

    texts = staticmethod(rows)
