"""Lines of JSON: the fields that make examples, and what each bad line is told."""

import gzip
import json

import pytest

from configs.errors import UserError
from data.sources.json_lines import Jsonl, JsonlText
from tests.data.conftest import pairs_of


@pytest.fixture
def write(tmp_path):
    def written(*lines, name="x.jsonl"):
        text = "".join(f"{x if isinstance(x, str) else json.dumps(x)}\n" for x in lines).encode()
        (tmp_path / name).write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
        return str(tmp_path / name)

    return written


def test_a_field_holds_the_text_also_inside_others(write):
    flat = write({"text": "one\ntwo\r", "x": 1}, "", {"text": " \t"}, {"text": "naïve"})
    deep = write({"page": {"body": "one"}}, name="deep.gz")
    source = JsonlText(train=flat, validation=flat)
    assert list(source.lines("train")) == ["one\ntwo\r", "naïve"]
    assert source.has_newlines
    source = JsonlText(train=deep, validation=deep, field="page.body")
    assert list(source.lines("validation")) == ["one"]


def test_the_name_of_a_field_may_have_a_dot(write):
    path = write({"page.body": "one", "page": {"body": "two"}}, {"page": {"body": "three"}})
    source = JsonlText(train=path, validation=path, field="page.body")
    assert list(source.lines("train")) == ["one", "three"]


def test_two_fields_are_a_pair(write):
    flat = write({"de": "a\tb\nc", "en": "ü"}, "")
    deep = write({"translation": {"de": "a", "en": "b"}}, name="deep.gz")
    source = Jsonl(train=flat, validation=flat, source_field="de", target_field="en")
    assert list(pairs_of(source, "train")) == [("a b c", "ü")]
    fields = {"source_field": "translation.en", "target_field": "translation.de"}
    assert list(pairs_of(Jsonl(train=deep, validation=deep, **fields), "train")) == [("b", "a")]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"de": "a"', r"jsonl, line 2: is not JSON: .*Legal: one JSON object per line"),
        ({"de": "a"}, r"jsonl, line 2: Jsonl.*train needs field 'en': no .*Its fields: de\."),
        ({"de": "a", "en": 3}, r"field 'en': found int, legal: text.  Its fields: de, en\."),
        ({"de": "a", "en": ["b"]}, r"field 'en': found list, legal: text"),
        ({"de": "a", "en": None}, r"field 'en': found null, legal: text"),
        (["en"], r"field '..': no such field.  Its fields: none: not an object\."),
        ('{"de": "a", "en": "\\ud800"}', r"jsonl, line 2: half a surrogate pair"),
        ("[" * 100_000, r"jsonl, line 2: is not JSON"),
    ],
)
def test_a_line_without_the_fields_is_named(write, line, message):
    path = write({"de": "a", "en": "b"}, line)
    with pytest.raises(UserError, match=message):
        list(JsonlText(train=path, validation=path, field="en").lines("train"))
    with pytest.raises(UserError, match=message):
        fields = {"source_field": "de", "target_field": "en"}
        list(pairs_of(Jsonl(train=path, validation=path, **fields), "train"))


def test_an_empty_shard_is_passed_over(write, tmp_path, log_lines):
    path = write({"text": "x"})
    (tmp_path / "empty.jsonl").touch()
    both = (f"{tmp_path}/empty.jsonl", path)
    assert list(JsonlText(train=both, validation=path).lines("train")) == ["x"]
    assert f"1 of 2 files are empty, such as {tmp_path}/empty.jsonl" in log_lines[0]


@pytest.mark.parametrize("lines", [[], [{"text": ""}]])
def test_files_without_text_are_named(write, lines):
    path = write(*lines)
    with pytest.raises(UserError, match=r"JsonlText.train: .*(is empty|no text in 1 records)"):
        list(JsonlText(train=path, validation=path).lines("train"))
