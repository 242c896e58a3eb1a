"""JSON of a known type: what is wrong is named in one line, whatever it is."""

import dataclasses
from typing import Any

import pytest

from configs.errors import UserError
from configs.json_reader import read_json


@dataclasses.dataclass(frozen=True)
class Part:
    name: str
    rate: float = 0.0


@pytest.mark.parametrize(
    ("text", "kind", "problem"),
    [
        ("{", dict[str, Any], "is not JSON: Expecting property name"),
        (b"\xff", dict[str, Any], "is not JSON: 'utf-8' codec can't decode"),
        ("[" * 100_000 + "]" * 100_000, list[Any], "is not JSON: its values are nested too deeply"),
        ("[1]", dict[str, Any], r"should be an object \(found \[1\]\)"),
        ('{"a": null}', dict[str, int], r"a: should be a valid integer \(found None\)"),
        ('{"a": 1' + "0" * 400 + "}", dict[str, int], r"a: .* \(found inf\)"),
        ('{"a": 1' + "0" * 9000 + "}", dict[str, int], r"a: .* \(found inf\)"),
        ('{"rate": 1}', Part, "name: Field required"),
        ('{"name": "x", "rate": [1]}', Part, "rate: should be a valid number"),
    ],
)
def test_what_is_wrong_is_named_in_one_line(text: str | bytes, kind: Any, problem: str) -> None:
    with pytest.raises(UserError, match=f"^x: {problem}") as error:
        read_json(text, kind, "x")
    assert "\n" not in str(error.value) and len(str(error.value)) < 400


def test_values_keep_their_types() -> None:
    assert read_json('{"name": "x", "more": 1}', Part, "x") == Part("x")
    [large, huge] = read_json("[12345678901234567890, 1" + "0" * 400 + "]", list[Any], "x")
    assert large == 12345678901234567890 and huge == float("inf")
