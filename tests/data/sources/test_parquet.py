"""Parquet files: the columns that make examples, and what each bad file is told."""

from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from configs.errors import UserError
from data.sources.parquet import Parquet, ParquetText
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
    source = ParquetText(train=path, validation=path, column=column)
    assert list(source.lines("train")) == [text for text in TEXTS if text]
    assert source.has_newlines


def test_two_columns_are_a_pair(path):
    columns = {"source_column": "deep.de", "target_column": "deep.en"}
    pairs = list(pairs_of(Parquet(train=path, test=path, validation=path, **columns), "test"))
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
    with pytest.raises(UserError, match=rf"ParquetText.train: .*x\.parquet.*{message}"):
        list(ParquetText(train=path, validation=path, column=column).lines("train"))


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
        list(ParquetText(train=f"{tmp_path}/*", validation="-").lines("train"))


def test_an_empty_shard_is_passed_over(tmp_path, log_lines):
    for name, texts in (("a", []), ("b", ["x"])):
        table = pyarrow.table({"text": pyarrow.array(texts, pyarrow.string())})
        parquet.write_table(table, tmp_path / f"{name}.parquet")
    assert list(ParquetText(train=f"{tmp_path}/*", validation="-").lines("train")) == ["x"]
    assert f"1 of 2 files are empty, such as {tmp_path}/a.parquet" in log_lines[0]


@pytest.mark.parametrize("damage", [lambda b: b"", lambda b: b[: len(b) // 2], lambda b: b[::-1]])
def test_a_damaged_file_is_named(path, tmp_path, damage):
    (tmp_path / "y.parquet").write_bytes(damage(Path(path).read_bytes()))
    with pytest.raises(UserError, match=r"ParquetText.train: .*y.parquet cannot be read as Parq"):
        list(ParquetText(train=f"{tmp_path}/*", validation="-").lines("train"))


def test_arrow_files_are_named_with_the_way_to_parquet(tmp_path):
    table, folder = pyarrow.table({"text": ["one", "two"]}), tmp_path / "saved"
    folder.mkdir()
    # A stream, as Hugging Face's library writes, and a file.
    kinds = {
        folder / "data.arrow": pyarrow.ipc.new_stream,
        tmp_path / "x.arrow": pyarrow.ipc.new_file,
    }
    for path, kind in kinds.items():
        with kind(str(path), table.schema) as writer:
            writer.write_table(table)
    (folder / "state.json").write_text("{}")
    for path in (folder, folder / "data.arrow", tmp_path / "x.arrow"):
        for source in (ParquetText, TextFiles):
            with pytest.raises(UserError) as error:
                list(source(train=str(path)).lines("train"))
            assert "Arrow file" in str(error.value) and "to_parquet(" in str(error.value)
            assert "Copy it again" not in str(error.value)


def test_a_file_of_another_kind_is_not_to_be_copied_again(tmp_path, path):
    (tmp_path / "x.jsonl").write_text('{"text": "one"}\n' * 9)
    with pytest.raises(UserError, match="It is not Parquet: another source reads it"):
        list(ParquetText(train=str(tmp_path / "x.jsonl")).lines("train"))
    (tmp_path / "cut.parquet").write_bytes(Path(path).read_bytes()[:-9])
    with pytest.raises(UserError, match="Copy it again"):
        list(ParquetText(train=str(tmp_path / "cut.parquet")).lines("train"))
