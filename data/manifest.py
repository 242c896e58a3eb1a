"""Keeps in a manifest what a cache was made from, so that another text or setting shows."""

import dataclasses
import hashlib
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from configs.errors import UserError
from configs.paths import path_of
from data import storage
from data.packing.rows import hashed_bytes
from data.task import Task
from data.tokenizers.tokenizer_json import read_bundle

FORMAT = 1
NAME = "manifest.json"
CHECKSUM = "crc32"
_FILES = ("Task.word_list", "SentencePiece.model_file", "TokenizerJson.path")
_OF_THE_ORDER = ("Mixture.rates", "Mixture.temperature")  # the rows do not depend on these


def settings(task: Task) -> dict[str, Any]:
    """Names every setting that the rows depend on, as gin names it."""
    values = dict(_flat(task))
    for name in (f"{type(task).__name__}.name", *_OF_THE_ORDER):
        values.pop(name, None)
    for name, path in list(values.items()):
        if path is not None and name.endswith(_FILES):
            values[f"the text of {name}"] = _file_hash(name, path)
    plain: dict[str, Any] = json.loads(json.dumps(values))  # as a manifest gives it back
    return plain


def _flat(spec: Any, scope: str = "") -> Iterator[tuple[str, Any]]:
    """Yields each parameter of a spec and of those in it.

    Specs of one kind that stand in different fields, or in one tuple, get scopes of their own.
    """
    fields = {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)}
    kinds = [type(value) for value in fields.values()]
    for field, value in fields.items():
        name = f"{scope}{type(spec).__name__}.{field}"
        if dataclasses.is_dataclass(value):
            yield name, f"@{type(value).__name__}()"
            twins = kinds.count(type(value)) > 1
            yield from _flat(value, f"{scope}{field}/" if twins else scope)
        elif isinstance(value, tuple) and any(map(dataclasses.is_dataclass, value)):
            yield name, [f"@{type(item).__name__}()" for item in value]
            for number, item in enumerate(value, 1):
                yield from _flat(item, f"{scope}{field}_{number}/")
        else:
            yield name, value


def _file_hash(name: str, path: str) -> str:
    try:
        is_tokenizer = name.endswith("TokenizerJson.path")
        content = read_bundle(path, {}) if is_tokenizer else path_of(path).read_bytes()
        return hashlib.sha256(content).hexdigest()[:16]
    except OSError as error:
        raise UserError(f"{name} = {path!r}: cannot be read: {error.strerror or error}.") from None


def text_hash(task: Task) -> str:
    """Reads all the text of a task and returns its content hash."""
    digests = {}
    for split in task.source.splits():
        digest = hashlib.sha256()
        for line in task.lines(split):
            digest.update(hashed_bytes(line))
        digests[split] = digest.hexdigest()
    return combined_hash(digests)


def combined_hash(digests: dict[str, str]) -> str:
    """Returns one hash for the hashes of the splits."""
    parts = "".join(f"{split} {digest}\n" for split, digest in digests.items())
    return hashlib.sha256(parts.encode()).hexdigest()


def read(folder: Path) -> dict[str, Any]:
    """Reads a manifest and checks that the files that it lists are there and whole."""
    try:
        manifest: dict[str, Any] = json.loads((folder / NAME).read_text())
        if manifest.pop(CHECKSUM, None) not in (None, _checksum(manifest)):  # old ones have none
            raise ValueError("it is damaged")
        files = manifest["file_bytes"] if manifest["format"] == FORMAT else {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{folder}: is not a complete cache ({NAME}: {error}).  {rebuild_hint()}"
        ) from None
    if not files:
        raise UserError(f"{folder}: was written by another version.  {rebuild_hint()}")
    for name, size in files.items():
        path = folder / name
        size_now = storage.size_of(path)
        if size_now != size:
            raise UserError(
                f"{path}: holds {size_now:,} bytes, {size:,} were written: the file is damaged.  "
                f"{rebuild_hint()}"
            )
    return manifest


def write(folder: Path, manifest: dict[str, Any]) -> None:
    """Writes a manifest, or replaces the old one."""
    content = {**manifest, CHECKSUM: _checksum(manifest)}
    storage.atomic_write(folder / NAME, json.dumps(content, indent=1) + "\n")


def _checksum(manifest: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(manifest).encode())


def rebuild_hint() -> str:
    return "Build it again: meshloom prepare --rebuild, with the same flags."


def refuse(folder: Path, cached: dict[str, Any], now: dict[str, Any]) -> None:
    """Raises an error that names every difference between two sets of values, if there is one."""
    names = [name for name in {**cached, **now} if cached.get(name) != now.get(name)]
    if not names:
        return
    rows = "".join(
        f"\n  {name}: {_shown(cached, name)} in the cache, {_shown(now, name)} now."
        for name in names
    )
    raise UserError(
        f"{folder}: the cache was built with other settings or text.{rows}\n"
        "  Give this task another Task.name, use another --data_dir, or replace the cache: "
        "meshloom prepare --rebuild, with the same flags."
    )


def _shown(values: dict[str, Any], name: str) -> str:
    return repr(values[name]) if name in values else "absent"
