"""Folders that Hugging Face did not write are refused in one line."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from configs.errors import UserError
from trainer.checkpoints.huggingface.folder import INDEX, TENSORS, existing, stored_tensors


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


@pytest.mark.parametrize("named", ["a", "b"])
def test_of_a_tensor_in_two_files_the_index_chooses(tmp_path: Path, named: str) -> None:
    files = {name: f"model-{name}.safetensors" for name in "ab"}
    for number, name in enumerate(files):
        save_file({"w": np.full(2, number, np.float32), name: np.ones(1)}, tmp_path / files[name])
    index = {"weight_map": {"w": files[named], **files}}
    (tmp_path / INDEX).write_text(json.dumps(index))
    stored = stored_tensors(tmp_path)
    assert set(stored) == {"w", "a", "b"} and stored["w"].read()[0] == "ab".index(named)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_values_that_are_no_numbers_are_counted(
    tmp_path: Path, dtype: type, caplog: pytest.LogCaptureFixture
) -> None:
    whole = np.arange(6, dtype=dtype).reshape(2, 3)
    broken = np.array([1, np.nan, -np.inf, 3], dtype)
    save_file({"whole": whole, "broken": broken}, tmp_path / TENSORS)
    tensors = stored_tensors(tmp_path)
    np.testing.assert_array_equal(tensors["whole"].read(), whole)
    assert not caplog.messages
    assert tensors["broken"].read().tobytes() == broken.tobytes()
    [warning] = caplog.messages
    assert "2 of the 4 values of broken" in warning


def test_a_name_of_the_hub_is_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"no such folder.*hf download NAME --local-dir=FOLDER"):
        existing(Path("meta-llama/Llama-3.2-1B"), "config.json")
