"""Folders that Hugging Face did not write are refused in one line."""

import errno
import io
import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from configs.errors import UserError
from trainer.checkpoints.huggingface import folder
from trainer.checkpoints.huggingface.folder import (
    INDEX,
    TENSORS,
    TensorWriter,
    existing,
    stored_tensors,
    with_joined_blocks,
)
from trainer.checkpoints.huggingface.weights import Place, TensorInfo


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


def test_blocks_and_scales_are_one_weight(tmp_path: Path) -> None:
    """Each number of the weight from its 4 bits, the lower ones of a byte first."""
    rng, shape = np.random.default_rng(0), (3, 5, 2, 16)
    blocks = rng.integers(0, 256, shape, np.uint8)
    scales = rng.integers(100, 150, shape[:3], np.uint8)
    others = {"other_blocks": np.ones(2, np.float32), "w": np.ones(3, np.float32)}
    save_file({"e.w_blocks": blocks, "e.w_scales": scales, **others}, tmp_path / TENSORS)
    tensors = with_joined_blocks(stored_tensors(tmp_path))
    assert set(tensors) == {"e.w", *others}
    assert tensors["e.w"].info == TensorInfo((3, 64, 5), "bfloat16")
    weight, positive = tensors["e.w"].read(), (0, 0.5, 1, 1.5, 2, 3, 4, 6)
    for expert, column, output in np.ndindex(weight.shape):
        block, place = divmod(column, 32)
        byte = int(blocks[expert, output, block, place // 2])
        bits = byte // 16 if place % 2 else byte % 16
        value = positive[bits % 8] * (-1 if bits >= 8 else 1)
        exponent = int(scales[expert, output, block]) - 127
        assert float(weight[expert, column, output]) == value * 2.0**exponent


@pytest.mark.parametrize(
    ("blocks", "scales", "others"),
    [
        (np.zeros((2, 3, 1, 16), np.uint8), np.zeros((2, 3, 2), np.uint8), {}),
        (np.zeros((2, 3, 1, 16), np.uint8), np.zeros((2, 3, 1), np.int8), {}),
        (np.zeros((2, 3, 1, 16), np.int8), np.zeros((2, 3, 1), np.uint8), {}),
        (np.zeros((2, 3, 1, 8), np.uint8), np.zeros((2, 3, 1), np.uint8), {}),
        (np.zeros((2, 3, 1, 16), np.uint8), np.zeros((2, 3, 1), np.uint8), {"w": np.zeros(1)}),
    ],
)
def test_other_blocks_and_scales_are_no_weight(
    tmp_path: Path, blocks: np.ndarray, scales: np.ndarray, others: dict[str, np.ndarray]
) -> None:
    save_file({"w_blocks": blocks, "w_scales": scales, **others}, tmp_path / TENSORS)
    assert set(with_joined_blocks(stored_tensors(tmp_path))) == {"w_blocks", "w_scales", *others}


@pytest.mark.parametrize("part", [(), (slice(None), slice(2, 4))])
def test_a_full_disk_is_an_error_of_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: tuple[slice, ...]
) -> None:
    """And no signal, as that of a mapped file is."""

    class FullDisk(io.FileIO):
        def write(self, raw: Any) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    writer = TensorWriter(tmp_path / TENSORS, {"w": TensorInfo((3, 4), "float32")})
    place, tensor = Place("w", (3, 4), (3, 4), part), np.ones((3, 2 if part else 4), np.float32)
    writer.write(place, tensor)
    np.testing.assert_array_equal(stored_tensors(tmp_path)["w"].read()[part], tensor)
    monkeypatch.setattr(folder, "open", lambda path, mode: FullDisk(path, "r+"), raising=False)
    with pytest.raises(OSError, match="No space left"):
        writer.write(place, tensor)


def test_a_name_of_the_hub_is_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"no such folder.*hf download NAME --local-dir=FOLDER"):
        existing(Path("meta-llama/Llama-3.2-1B"), "config.json")


def test_tensors_fill_files_of_a_size() -> None:
    info = TensorInfo((3, 4), "float32")
    parts = folder.parts_of({"a": info, "b": info, "c": info}, 100)
    assert [list(part) for part in parts] == [["a", "b"], ["c"]]
