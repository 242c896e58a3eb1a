"""Folders that Hugging Face did not write are refused in one line."""

import json
from pathlib import Path

import pytest

from configs.errors import UserError
from scripts.commands.conversion.t5 import INDEX, read_folder


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/b", 3, None, ["x"], {}])
def test_an_index_names_files_of_its_folder(tmp_path: Path, name: object) -> None:
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"shared.weight": name}}))
    with pytest.raises(UserError, match=r"weight_map names .*Legal: files of this folder"):
        read_folder(tmp_path)


@pytest.mark.parametrize("text", ["[" * 100_000, "{", "[]", '{"weight_map": 3}'])
def test_an_index_of_another_form(tmp_path: Path, text: str) -> None:
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(UserError, match=INDEX):
        read_folder(tmp_path)
