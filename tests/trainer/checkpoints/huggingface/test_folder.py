"""Folders that Hugging Face did not write are refused in one line."""

import json
from pathlib import Path

import pytest

from configs.errors import UserError
from trainer.checkpoints.huggingface.folder import INDEX, stored_tensors


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/b", 3, None, ["x"], {}])
def test_an_index_names_files_of_its_folder(tmp_path: Path, name: object) -> None:
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"shared.weight": name}}))
    with pytest.raises(UserError, match=r"weight_map names .*Legal: files of this folder"):
        stored_tensors(tmp_path)


@pytest.mark.parametrize("text", ["[" * 100_000, "{", "[]", '{"weight_map": 3}'])
def test_an_index_of_another_form(tmp_path: Path, text: str) -> None:
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(UserError, match=INDEX):
        stored_tensors(tmp_path)
