"""Parquet, Arrow and CSV files: the columns that make examples, and errors of bad files."""

import csv
import gzip
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from configs.errors import UserError
from data.sources.tables import Table, TablePreferences, TableText
from data.sources.text import TextFiles
from tests.data.conftest import pairs_of

TEXTS = ["one\ntwo", "", *(f"naïve {i}" for i in range(3000))]
TABLE = {
    "text": TEXTS,
    "large": pyarrow.array(TEXTS, pyarrow.large_string()),
    "view": pyarrow.array(TEXTS, pyarrow.string_view()),
    "coded": pyarrow.array(TEXTS).dictionary_encode(),
    "deep": [{"de": text, "en": text[::-1]} for text in TEXTS],
    "id": range(len(TEXTS)),
    "list": [[text] for text in TEXTS],
}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("parquet") / "x.parquet"
    parquet.write_table(pyarrow.table(TABLE), path, row_group_size=700)
    return str(path)


@pytest.mark.parametrize("column", ["text", "large", "view", "coded", "deep.de"])
def test_a_column_holds_the_text(path, column):
    source = TableText(train=path, validation=path, column=column)
    assert list(source.lines("train")) == [text for text in TEXTS if text]
    assert source.has_newlines


def test_two_columns_are_a_pair(path):
    columns = {"source_column": "deep.de", "target_column": "deep.en"}
    pairs = list(pairs_of(Table(train=path, test=path, validation=path, **columns), "test"))
    assert pairs[0] == ("one two", "owt eno")
    assert pairs[2:] == [(text, text[::-1]) for text in TEXTS[2:]]


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ("txt", r"no column 'txt'.  Did you mean text\?  Its columns: text, large"),
        ("deep.fr", r"no column 'deep.fr'.*Its columns: de, en\."),
        ("text.de", r"no column 'text.de'"),
        ("id", r"column 'id': found int64, legal: string"),
        ("list", r"column 'list': found list<.*>, legal: string"),
        ("deep", r"column 'deep': found struct<.*>, legal: string"),
    ],
)
def test_a_column_that_is_no_text_is_named(path, column, message):
    with pytest.raises(UserError, match=rf"TableText.train: .*x\.parquet.*{message}"):
        list(TableText(train=path, validation=path, column=column).lines("train"))


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["a", None], r"row 2: column 'text': found null, legal: text"),
        (pyarrow.array([b"a", b"a\xff"]).view(pyarrow.string()), r"row 2: .*byte 2 is 0xff"),
        (pyarrow.array([], pyarrow.string()), r"x\.parquet is empty: it has no row"),
    ],
)
def test_a_row_without_text_is_named(tmp_path, texts, message):
    parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "x.parquet")
    with pytest.raises(UserError, match=message):
        list(TableText(train=f"{tmp_path}/*", validation="-").lines("train"))


def test_an_empty_shard_is_passed_over(tmp_path, log_lines):
    for name, texts in (("a", []), ("b", ["x"])):
        table = pyarrow.table({"text": pyarrow.array(texts, pyarrow.string())})
        parquet.write_table(table, tmp_path / f"{name}.parquet")
    assert list(TableText(train=f"{tmp_path}/*", validation="-").lines("train")) == ["x"]
    assert f"1 of 2 files are empty, such as {tmp_path}/a.parquet" in log_lines[0]


@pytest.mark.parametrize("damage", [lambda b: b"", lambda b: b[: len(b) // 2], lambda b: b[::-1]])
def test_a_damaged_file_is_named(path, tmp_path, damage):
    (tmp_path / "y.parquet").write_bytes(damage(Path(path).read_bytes()))
    with pytest.raises(UserError, match=r"TableText.train: .*y.parquet cannot be read as Parquet"):
        list(TableText(train=f"{tmp_path}/*", validation="-").lines("train"))


def written(folder: Path, table: pyarrow.Table) -> dict[str, Path]:
    """One table in each form: an Arrow stream is what Hugging Face's library writes."""
    paths = {kind: folder / f"x.{kind}" for kind in ("stream", "file", "csv", "csv.gz")}
    for kind, new in (("stream", pyarrow.ipc.new_stream), ("file", pyarrow.ipc.new_file)):
        with new(str(paths[kind]), table.schema) as writer:
            writer.write_table(table, max_chunksize=700)
    with paths["csv"].open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(table.column_names)
        rows.writerows(zip(*table.to_pydict().values(), strict=True))
    paths["csv.gz"].write_bytes(gzip.compress(paths["csv"].read_bytes()))
    return paths


def test_arrow_and_csv_hold_the_same(tmp_path):
    texts = ["one\ntwo", 'a "quoted", word', *(f"naïve {i}" for i in range(3000))]
    table = pyarrow.table({"text": texts, "other": [text[::-1] for text in texts]})
    for path in map(str, written(tmp_path, table).values()):
        assert list(TableText(train=path, validation=path).lines("train")) == texts, path
        columns = {"source_column": "other", "target_column": "text"}
        pairs = list(pairs_of(Table(train=path, test=path, validation=path, **columns), "test"))
        assert pairs[2:] == [(text[::-1], text) for text in texts[2:]], path
        with pytest.raises(UserError, match=r"no column 'txt'.  Did you mean text\?"):
            list(TableText(train=path, validation=path, column="txt").lines("train"))


def test_a_folder_of_arrow_files_and_one_that_is_read_as_text(tmp_path):
    paths = written(tmp_path, pyarrow.table({"text": ["one", "two"]}))
    with pytest.raises(
        UserError, match=r"is Parquet or Arrow.  @TableText\(\) and @Table\(\) read"
    ):
        list(TextFiles(train=str(paths["stream"])).lines("train"))
    paths["stream"].rename(tmp_path / "data.arrow")
    with pytest.raises(UserError, match=r"is a folder.  Name its files, such as '.*\*\.arrow'"):
        list(TableText(train=str(tmp_path)).lines("train"))
    (tmp_path / "train").mkdir()  # as datasets saves several splits
    (tmp_path / "data.arrow").rename(tmp_path / "train" / "data.arrow")
    (tmp_path / "dataset_dict.json").write_text("{}")
    with pytest.raises(UserError, match=r"such as '.*/train/\*\.arrow'"):
        list(TableText(train=str(tmp_path)).lines("train"))


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"text\n", "is empty: it has no row"),
        (b"", "is empty: it has no row|no column 'text'"),
        (b"text,b\n1,2\n1,2,3\n", r"cannot be read as Parquet.*got 3.*Mend this row\."),
        (b"text\n" + b"one\n" * 50_000 + b"1,2\n" + b"one\n" * 9, r"Row #50001: .*Mend this row"),
        (b"text,text\n1,2\n", r"has 2 columns 'text'\.  Rename all but one\."),
        (b"text\na\xff\n", "row 1: column 'text': byte 2 is 0xff"),
        (b"a;b\n1;2\n", "no column 'text'.*Its columns: a;b"),
        (b"text,b\rone,1\r", "cannot be read as Parquet, Arrow or .csv.*new-line"),
        (b"text," + b"b" * 200_000 + b"\n1,2\n", "field larger than field limit"),
    ],
)
def test_a_csv_that_is_none_is_named(tmp_path, raw, message):
    (tmp_path / "x.csv").write_bytes(raw)
    with pytest.raises(UserError, match=message):
        list(TableText(train=str(tmp_path / "x.csv"), validation="-").lines("train"))


def test_an_ending_may_have_capitals(tmp_path):
    (tmp_path / "x.CSV").write_bytes(b"text\none\n")
    assert list(TableText(train=str(tmp_path / "x.CSV"), validation="-").lines("train")) == ["one"]


def test_numbers_in_a_csv_are_text(tmp_path):
    (tmp_path / "x.csv").write_text("\ufefftext,n\n007,\n,1\nNULL,2\n")
    path = str(tmp_path / "x.csv")
    assert list(TableText(train=path, validation=path).lines("train")) == ["007", "NULL"]
    columns = {"prompt": "text", "chosen": "n", "rejected": "text"}
    source = TablePreferences(train=path, validation=path, **columns)
    assert list(source.read("train"))[2] == ("NULL", "2", "NULL")


def test_a_file_of_another_kind_is_not_to_be_copied_again(tmp_path, path):
    (tmp_path / "x.jsonl").write_text('{"text": "one"}\n' * 9)
    with pytest.raises(UserError, match="It is none of these: another source reads it"):
        list(TableText(train=str(tmp_path / "x.jsonl")).lines("train"))
    (tmp_path / "cut.parquet").write_bytes(Path(path).read_bytes()[:-9])
    with pytest.raises(UserError, match="Copy it again"):
        list(TableText(train=str(tmp_path / "cut.parquet")).lines("train"))
