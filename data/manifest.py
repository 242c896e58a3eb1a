"""Records in a manifest what a cache was made from, so that changed text or settings show."""

import dataclasses
import hashlib
import importlib.metadata
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, NonNegativeInt

from configs.errors import UserError
from configs.json_reader import CHECKSUM, checked, read_json, sign
from configs.paths import path_of
from data.packing.rows import Counts
from data.storage import lookup, remote
from data.storage.arrays import REBUILD
from data.storage.files import atomic_write
from data.task import Task
from data.vocabs import TARGET_FILE, Vocabs

FORMAT = 1
NAME = "manifest.json"
_OF_THE_ORDER = (  # the rows do not depend on these
    "Mixture.rates", "Mixture.temperature", "Mixture.stages",
    "TextMixture.rates", "TextMixture.temperature", "TextMixture.stages",
)  # fmt: skip
_GIVEN = "given_vocabs"
_TEXT = "the text of "


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Part(Counts):
    name: str
    dropped: dict[str, NonNegativeInt]


@dataclasses.dataclass(frozen=True)
class _Split(Counts):
    parts: Sequence[_Part] = ()
    chunk_sizes: Sequence[tuple[NonNegativeInt, NonNegativeInt, NonNegativeInt]] = ()
    files: Sequence[tuple[str, NonNegativeInt]] = ()


@dataclasses.dataclass(frozen=True)
class _Stored:
    """Describes the content of a manifest."""

    settings: dict[str, Any]
    content_hash: str
    text_hash: str
    vocab_hash: str
    splits: Annotated[dict[str, _Split], Field(min_length=1)]
    fingerprint: dict[str, Any] | None
    file_bytes: Annotated[dict[str, NonNegativeInt], Field(min_length=1)]
    versions: Mapping[str, str]
    source_vocab_hash: str = ""
    given_vocabs: Sequence[str] = ()


@dataclasses.dataclass(frozen=True)
class CacheKey:
    """Holds what a cache depends on besides the text."""

    settings: dict[str, Any]
    defaults: frozenset[str]
    """Settings at their default, which a matching cache of an older version may lack."""
    versions: dict[str, str]
    """Versions of the packages that train vocabularies and tokenize."""
    vocabs: dict[str, str]
    """Hashes of the vocabularies that are given rather than trained."""
    named_vocabs: dict[str, str]
    """Hashes of the vocabularies that the settings name."""

    @classmethod
    def of(cls, task: Task, given: Vocabs | None) -> "CacheKey":
        tokenizers = {file: settings.given() for file, settings in task.vocab_settings.items()}
        files = {"vocab": TARGET_FILE, "source_vocab": task.source_vocab_file}
        named = {name: tokenizers[file] for name, file in files.items() if file is not None}
        named_now = {name: vocab.hash[:16] for name, vocab in named.items() if vocab is not None}
        hashes = {} if given is None else given.hashes()
        given_now = {name.removesuffix("_hash"): digest[:16] for name, digest in hashes.items()}
        vocabs = {name: x for name, x in given_now.items() if named_now.get(name) != x}
        defaults = frozenset(name for name, value, default in _parameters(task) if value == default)
        packages = {tokenizer.package for tokenizer in task.vocab_settings.values()}
        versions = {p: importlib.metadata.version(p) for p in sorted(filter(None, packages))}
        return cls(settings(task), defaults, versions, vocabs, named_now)

    def written(self) -> dict[str, Any]:
        """Returns what a manifest stores of the key."""
        given = {_GIVEN: sorted(self.vocabs)} if self.vocabs else {}
        return {"format": FORMAT, "settings": self.settings, "versions": self.versions, **given}

    def digest(self, stamps: dict[str, Any] | None) -> str:
        """Returns a short name for the key and the fingerprint of the text."""
        vocabs = {**self.named_vocabs, **self.vocabs}
        text = json.dumps([self.written(), vocabs, stamps], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:8]

    def differences(self, stored: dict[str, Any], *, any_version: bool = False) -> list[str]:
        """Describes each setting, vocabulary or version that differs from those of a cache."""
        if stored["format"] != FORMAT:
            return [difference("the format of caches", stored["format"], FORMAT)]
        cached, now = dict(stored["settings"]), dict(self.settings)
        for name in [x for x in cached.keys() - now.keys() if x.startswith(_TEXT)]:
            del cached[name]  # text of a vocabulary, which its hash covers
        for name in self.defaults - cached.keys():
            now.pop(name, None)
        if not any_version and self.versions:
            cached, now = cached | stored["versions"], now | self.versions
        names = [name for name in {**cached, **now} if cached.get(name) != now.get(name)]
        different = [difference(name, cached.get(name), now.get(name)) for name in names]
        return [*different, *self._vocab_differences(stored)]

    def _vocab_differences(self, stored: dict[str, Any]) -> Iterator[str]:
        for name in sorted({*self.vocabs, *self.named_vocabs, *stored.get(_GIVEN, ())}):
            before = stored.get(f"{name}_hash", "")[:16]
            now = self.vocabs.get(name, self.named_vocabs.get(name))
            if now is None:
                yield f"{name} was a run's ({before!r}) and is trained, without Run.start_from"
            elif now != before:
                yield difference(name, before, now)


def difference(name: str, old: object, new: object) -> str:
    """Describes how a value differs from the cached one."""
    return f"{name} was {old!r} and is {new!r}"


def settings(task: Task) -> dict[str, Any]:
    """Returns every setting that the rows depend on, by its gin name."""
    values = dict[str, Any]()
    for name, value, _ in _parameters(task):
        if isinstance(value, tuple) and any(map(dataclasses.is_dataclass, value)):
            value = [f"@{type(item).__name__}()" for item in value]
        elif dataclasses.is_dataclass(value):
            value = f"@{type(value).__name__}()"
        if values.setdefault(name, value) != value:
            raise UserError(
                f"{type(task).__name__}: {name} is {values[name]!r} in one of its settings and "
                f"{value!r} in another.  Do not nest the same kind of settings at two depths."
            )
    for name in (f"{type(task).__name__}.name", *_OF_THE_ORDER):
        values.pop(name, None)
    name = f"{type(task).__name__}.word_list"
    if (path := values[name]) is not None:
        content = lookup.read_bytes(f"{name} = {path!r}", path_of(path).expanduser())
        values[f"{_TEXT}{name}"] = hashlib.sha256(content).hexdigest()[:16]
    return json.loads(json.dumps(values))  # as it is read from a manifest


def _parameters(spec: Any, scope: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yields name, value and default of each parameter of a spec and of the specs in it.

    Specs of one class in different fields, or in one tuple, get scopes of their own.
    """
    fields = [(field, getattr(spec, field.name)) for field in dataclasses.fields(spec)]
    kinds = [type(value) for _, value in fields]
    for field, value in fields:
        yield f"{scope}{type(spec).__name__}.{field.name}", value, field.default
        if dataclasses.is_dataclass(value):
            twins = kinds.count(type(value)) > 1
            yield from _parameters(value, f"{scope}{field.name}/" if twins else scope)
        elif isinstance(value, tuple) and any(map(dataclasses.is_dataclass, value)):
            for number, item in enumerate(value, 1):
                yield from _parameters(item, f"{scope}{field.name}_{number}/")


def split_hashes(task: Task) -> dict[str, str]:
    """Reads all text of a task, and returns the hash of each split that has any."""
    digests = {}
    for split in task.source.splits():
        digest = hashlib.sha256()
        if sum(1 for part in task.parts_of_text(split, digest) for _ in part.examples):
            digests[split] = digest.hexdigest()
    return digests


def combined_hash(digests: dict[str, str]) -> str:
    """Combines the hashes of the splits into one."""
    parts = "".join(f"{split} {digest}\n" for split, digest in digests.items())
    return hashlib.sha256(parts.encode()).hexdigest()


def read(folder: Path) -> dict[str, Any]:
    """Reads a manifest, and checks that all files that it lists are there and complete."""
    manifest = load(folder)
    for name, size in manifest["file_bytes"].items():
        path = folder / name
        size_now = lookup.size_of(path)
        if size_now != size:
            raise UserError(
                f"{path}: has {size_now:,} bytes instead of {size:,}: the file is damaged.  "
                f"{REBUILD}"
            )
    return manifest


def load(folder: Path) -> dict[str, Any]:
    """Reads a manifest; for one of another format, returns only the format's number."""
    try:
        signed = read_json((folder / NAME).read_bytes(), dict[str, Any], NAME)
        manifest = {name: value for name, value in signed.items() if name != CHECKSUM}
        if signed != sign(manifest):
            raise ValueError(f"{NAME}: it is damaged")
        if manifest["format"] != FORMAT:
            return {"format": manifest["format"], "file_bytes": {}}
        checked(manifest, _Stored, NAME)
        return manifest
    except (OSError, ValueError, KeyError) as error:
        remote.raise_failure(error)
        raise UserError(
            f"{folder}: is not a complete cache ({str(error).rstrip('.')}).  {REBUILD}"
        ) from None


def write(folder: Path, manifest: dict[str, Any]) -> None:
    """Writes a manifest, or replaces the old one."""
    atomic_write(folder / NAME, json.dumps(sign(manifest), indent=1) + "\n")
