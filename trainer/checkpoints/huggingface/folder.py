"""Reads and writes Hugging Face's model folders, one tensor at a time."""

import contextlib
import json
import logging
import math
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open

from configs import json_reader
from configs.errors import UserError, brief
from data.sources.text_files import POINTER
from data.storage.files import atomic_path, atomic_write
from trainer.checkpoints.huggingface import mxfp4
from trainer.checkpoints.huggingface.families import Settings
from trainer.checkpoints.huggingface.weights import Infos, Place, TensorInfo

logger = logging.getLogger(__name__)

SETTINGS, TENSORS = "config.json", "model.safetensors"
INDEX = f"{TENSORS}.index.json"
"""Maps tensors to files, if there are several files."""
DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64"}
"""Types of weights by their names in safetensors."""


def json_bytes(content: Mapping[str, Any]) -> bytes:
    """Writes settings as Hugging Face does."""
    return (json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()


def existing(folder: Path, name: str) -> Path:
    """Returns the path of a file in a folder, or raises if it does not exist."""
    if not folder.is_dir():
        raise UserError(
            f"--input={folder}: {'not a' if folder.exists() else 'no such'} folder.  Legal: a "
            "folder with a model.  To get one from the Hub: hf download NAME --local-dir=FOLDER."
        )
    for file in folder.iterdir():
        if file.is_file() and file.stat().st_size < 1024 and file.read_bytes().startswith(POINTER):
            raise UserError(f"{file}: a pointer of Git LFS.  `git lfs pull` fetches the files.")
    if not (folder / name).is_file():
        if name == TENSORS and (pickled := sorted(folder.glob("pytorch_model*.bin"))):
            raise UserError(
                f"--input={folder}: {TENSORS} is missing, and {pickled[0].name} is a pickle, which "
                "can run code.  Hugging Face's library converts it: AutoModelForCausalLM (with an "
                f"encoder, AutoModelForSeq2SeqLM).from_pretrained({str(folder)!r}, dtype='auto')"
                f".save_pretrained({str(folder)!r})."
            )
        legal = (
            f"Legal: a folder with {SETTINGS}, {TENSORS} (or {INDEX} and the files that it names) "
            "and the tokenizer, as save_pretrained writes them."
        )
        if name.startswith("adapter_"):
            legal = "Legal: a folder with adapter_config.json and adapter_model.safetensors."
            legal += "  `meshloom import hf` reads whole models."
        elif name == SETTINGS and (folder / "adapter_config.json").is_file():
            legal = "`meshloom import peft` reads adapters."
        elif any(folder.glob("*.gguf")):
            legal += "  GGUF files are not read: download the model that they were made from."
        raise UserError(f"--input={folder}: {name} is missing.  {legal}")
    return folder / name


def read_json(folder: Path, name: str) -> Settings:
    """Reads a JSON file that contains an object."""
    path = existing(folder, name)
    return json_reader.read_json(path.read_bytes(), Settings, path)


class StoredTensor(NamedTuple):
    """Names a tensor in a file, which is read only when it is needed."""

    file: Path
    name: str
    info: TensorInfo
    place: Place | None = None
    """The part to read; None reads all."""
    scales: "StoredTensor | None" = None
    """The scales, if this tensor holds the blocks of a weight in MXFP4."""

    def read(self) -> np.ndarray:
        """Reads the tensor, and warns of infinite values and NaNs.

        The file is mapped into memory only during the read.
        """
        place = self.place or Place(self.name, self.info.shape, self.info.shape)
        is_sliced = self.scales is None and place.view == self.info.shape
        with safe_open(self.file, "numpy") as file:
            array: np.ndarray = file.get_slice(self.name)[place.part if is_sliced else ()]
        if self.scales is not None:
            array = mxfp4.dequantized(array, self.scales.read())
        if not is_sliced:
            array = array.reshape(place.view)[place.part]
        if count := array.size - np.count_nonzero(np.isfinite(array)):
            logger.warning(
                "Warning: %s: %d of the %d values of %s are infinite or not a number.",
                self.file, count, array.size, self.name,
            )  # fmt: skip
        return array


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Describes all tensors of a folder, in one file or several, without reading them.

    If several files have a tensor, the one that the index names counts.
    """
    file_of, stored = weight_map(folder), dict[str, StoredTensor]()
    files = [TENSORS] if file_of is None else sorted(set(file_of.values()))
    for file in [existing(folder, name) for name in files]:
        for tensor in tensors_of_file(file):
            if tensor.name not in stored or (file_of or {}).get(tensor.name) == file.name:
                stored[tensor.name] = tensor
    return stored


def with_joined_blocks(stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Returns the tensors, with the blocks and the scales of each MXFP4 weight joined into one."""
    joined = dict(stored)
    for name, tensor in stored.items():
        whole = name.removesuffix(mxfp4.BLOCKS)
        scales = stored.get(whole + mxfp4.SCALES)
        if scales and whole not in stored and mxfp4.is_weight(tensor.info, scales.info):
            del joined[name], joined[scales.name]
            experts, outputs, blocks, size = tensor.info.shape  # a byte holds two numbers
            info = TensorInfo((experts, 2 * blocks * size, outputs), "bfloat16")
            joined[whole] = tensor._replace(info=info, scales=scales)
    return joined


def weight_map(folder: Path) -> dict[str, str] | None:
    """Returns the file of each tensor according to the index, or None if there is only one."""
    if (folder / TENSORS).is_file() or not (folder / INDEX).is_file():
        return None
    parts = read_json(folder, INDEX).get("weight_map")
    if not isinstance(parts, dict):
        raise UserError(f"{folder / INDEX}: weight_map is missing.  Save the model again.")
    odd = [name for name in parts.values() if not isinstance(name, str) or Path(name).name != name]
    if odd:
        raise UserError(
            f"{folder / INDEX}: weight_map names {brief(repr(odd[0]))}.  "
            "Legal: files of this folder."
        )
    return parts


def tensors_of_file(path: Path) -> Iterator[StoredTensor]:
    """Yields the tensors of a file, or raises if the file is truncated."""
    try:
        with safe_open(path, "numpy") as file:
            for name in file.keys():  # noqa: SIM118
                part = file.get_slice(name)
                dtype = DTYPES.get(part.get_dtype(), part.get_dtype())
                yield StoredTensor(path, name, TensorInfo(tuple(part.get_shape()), dtype))
    except (SafetensorError, TypeError, OSError) as error:
        raise UserError(f"{path}: cannot be read as safetensors: {error}.") from None


class TensorWriter:
    """Writes the tensors of one file in any order, each at its offset.

    A file begins with the length of a JSON header, which has each tensor's type, shape and offsets.
    """

    def __init__(self, path: Path, tensors: Infos):
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # as Hugging Face requires
        end = 0
        self.places: dict[str, int] = {}
        widest_first = sorted(tensors.items(), key=lambda item: -np.dtype(item[1].dtype).itemsize)
        for name, info in widest_first:
            start, end = end, end + info.bytes
            kind = next(kind for kind, dtype in DTYPES.items() if dtype == info.dtype)
            header[name] = {"dtype": kind, "shape": info.shape, "data_offsets": [start, end]}
            self.places[name] = start
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8
        self.first = 8 + len(text)
        self.path = path
        with open(path, "wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            file.truncate(self.first + end)

    def write(self, place: Place, tensor: np.ndarray) -> None:
        """Writes a tensor, or one part of a tensor that joins several, at its offset."""
        start = self.first + self.places[place.tensor]  # mapped, a full disk would kill the process
        with open(self.path, "r+b") as file:
            file.seek(start)
            if place.part:
                whole = np.fromfile(file, tensor.dtype, math.prod(place.view)).reshape(place.view)
                whole[place.part] = tensor.reshape(whole[place.part].shape)
                tensor = whole
                file.seek(start)
            file.write(tensor.tobytes())


@contextlib.contextmanager
def tensor_writer(
    folder: Path, tensors: Infos, max_bytes: int, name: str
) -> Iterator[Callable[[Place, np.ndarray], None]]:
    """Yields a function that writes a tensor, or a part of one, in any order.

    The files appear when all are complete.
    """
    parts = parts_of(tensors, max_bytes)
    files = {
        (f"model-{i:05}-of-{len(parts):05}.safetensors" if len(parts) > 1 else name): part
        for i, part in enumerate(parts, 1)
    }
    with contextlib.ExitStack() as stack:
        writers: dict[str, TensorWriter] = {}
        for file, part in files.items():
            path = stack.enter_context(atomic_path(folder / file))
            writers |= dict.fromkeys(part, TensorWriter(path, part))
        yield lambda place, tensor: writers[place.tensor].write(place, tensor)
    if len(files) > 1:
        total = sum(tensor.bytes for tensor in tensors.values())
        weight_map = {name: file for file, part in files.items() for name in part}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        atomic_write(folder / INDEX, json.dumps(index, indent=2) + "\n")


def parts_of(tensors: Infos, max_bytes: int) -> list[dict[str, TensorInfo]]:
    """Splits tensors, in order, into files of at most `max_bytes`, or of one larger tensor."""
    parts: list[dict[str, TensorInfo]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if parts[-1] and size + tensor.bytes > max_bytes:
            parts.append({})
            size = 0
        parts[-1][name] = tensor
        size += tensor.bytes
    return parts
