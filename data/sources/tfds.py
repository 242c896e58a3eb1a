"""Reads TFDS data sets, made and served as ArrayRecord files, without TensorFlow."""

import contextlib
import glob
import importlib
import importlib.util
import re
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any

from configs.errors import UserError, did_you_mean
from configs.paths import local_path

_RECORDS_PER_READ = 1024


def lines(
    name: str, folder: str | None, archives: str | None, split: str, feature: str
) -> Iterator[str]:
    """Yields one text feature of a split; line breaks inside it become spaces."""
    for [text] in texts("Tfds", name, folder, archives, split, {"feature": feature}):
        line = text.replace("\n", " ")
        if line and not line.isspace():
            yield line


def texts(
    kind: str,
    name: str,
    folder: str | None,
    archives: str | None,
    split: str,
    features: Mapping[str, str],
    errors: str = "strict",
) -> Iterator[list[str]]:
    """Yields some text features of each record of a split.

    kind is the spec that names the data set, and features names them by its parameters; errors is
    what bytes.decode makes of bytes that are not UTF-8.
    """
    builder = prepared(kind, name, folder, archives)
    _check_features(kind, builder, features)
    try:
        records = builder.as_data_source(split=split)
    except ValueError as error:
        legal = ", ".join(builder.info.splits)
        raise UserError(
            f"{kind}: split {split!r} of {name}: {error}  Its splits: {legal}."
        ) from None
    for start in range(0, len(records), _RECORDS_PER_READ):
        stop = min(start + _RECORDS_PER_READ, len(records))
        for number, record in enumerate(records.__getitems__(range(start, stop)), start + 1):
            place = f"{name}, split {split!r}, record {number:,}"
            yield [
                _text(record[feature], f"{kind}.{parameter} = {feature!r}: {place}", errors)
                for parameter, feature in features.items()
            ]


def _text(raw: object, place: str, errors: str) -> str:
    if not isinstance(raw, bytes):
        raise UserError(f"{place}: found {type(raw).__name__}, legal: text.")
    try:
        return raw.decode("utf-8", errors)
    except UnicodeDecodeError as error:
        raise UserError(
            f"{place}: byte {error.start + 1} is {raw[error.start]:#04x}, not UTF-8."
        ) from None


def stamps(kind: str, name: str, folder: str | None) -> dict[str, Any] | None:
    """Names the version of a data set and the records of its splits; None before it is made."""
    info = _builder(kind, name, folder).info
    splits = {split: list(split_info.shard_lengths) for split, split_info in info.splits.items()}
    return {"name": info.full_name, **splits} if splits else None


def prepared(kind: str, name: str, folder: str | None, archives: str | None) -> Any:
    """Returns TFDS's builder of a data set, downloaded and written as ArrayRecord files."""
    builder = _builder(kind, name, folder)
    import tensorflow_datasets as tfds
    from tensorflow_datasets.core.download.download_manager import NonMatchingChecksumError

    tfds.disable_progress_bar()  # it redraws over the caller's own
    config = tfds.download.DownloadConfig(manual_dir=archives)
    try:
        with _files_without_tensorflow(builder):
            builder.download_and_prepare(download_config=config)
    except (OSError, tfds.download.DownloadError, NonMatchingChecksumError) as error:
        raise UserError(_not_prepared(kind, builder, error)) from error
    return builder


def _builder(kind: str, name: str, folder: str | None) -> Any:
    try:
        import tensorflow_datasets as tfds  # costs 0.8 s, which other sources need not pay
    except ImportError as error:
        raise UserError(
            f"@{kind}(): TFDS is not installed ({error}).  Install the extra: "
            'pip install -e ".[tfds]"'
        ) from None
    if folder is not None:
        local_path(folder, f"{kind}.folder")
    if re.match(r"\w+:[a-zA-Z_]", name):
        raise UserError(
            f"{kind}.name = {name!r}: a community data set, whose code TFDS would download and run."
            "  Legal: a data set of TFDS itself."
        )
    _import_builder(name)
    try:
        return tfds.builder(name, data_dir=folder, file_format="array_record")
    except (tfds.core.DatasetNotFoundError, ValueError) as error:
        raise UserError(f"{kind}.name = {name!r}: {_why_not(name, error)}") from None


def _why_not(name: str, error: Exception) -> str:
    import tensorflow_datasets as tfds

    data_set = name.partition("/")[0]
    try:
        legal = tfds.builder_cls(data_set).builder_configs
    except (tfds.core.DatasetNotFoundError, ValueError):
        known = tfds.list_builders(with_community_datasets=False)
        return f"TFDS has no such data set.{did_you_mean(name, known)}"
    first_line = str(error).partition("\n")[0]
    return f"{first_line}  The configurations of {data_set}: {', '.join(legal) or 'none'}."


def _import_builder(name: str) -> None:
    """Makes known a builder that TFDS does not import by itself, such as those of WMT."""
    stem = name.partition("/")[0].removesuffix("_translate")
    for package in ("translate", "text"):
        module = f"tensorflow_datasets.{package}.{stem}"
        if stem.isidentifier() and importlib.util.find_spec(module):
            importlib.import_module(module)


def _not_prepared(kind: str, builder: Any, error: Exception) -> str:
    files = ", ".join(info.filename for info in builder.url_infos.values() if info.filename)
    first_line = str(error).partition("\n")[0]
    return (
        f"{kind}.name = {builder.name!r}: could not be downloaded or written to {builder.data_dir} "
        f"({first_line}).  Where there is no network, copy its archives ({files}) into a folder "
        f"and set {kind}.archives to that folder."
    )


def _check_features(kind: str, builder: Any, features: Mapping[str, str]) -> None:
    legal = sorted(builder.info.features)
    for parameter, feature in features.items():
        if feature not in legal:
            raise UserError(
                f"{kind}.{parameter} = {feature!r}: {builder.name} has no such feature.  "
                f"Its features: {', '.join(legal)}."
            )


@contextlib.contextmanager
def _files_without_tensorflow(builder: Any) -> Iterator[None]:
    """Stands in for the three functions of TensorFlow that TFDS needs while it unpacks.

    TFDS 4.9 writes ArrayRecord files without TensorFlow, but its archive reader and some builders,
    lm1b among them, open and list local files through `tf.io.gfile`.
    """
    if importlib.util.find_spec("tensorflow"):
        yield
        return
    from tensorflow_datasets.core.download import extractor

    candidates: list[Any] = [extractor, sys.modules[type(builder).__module__]]
    modules = [module for module in candidates if hasattr(module, "tf")]
    kept = [module.tf for module in modules]
    for module in modules:
        module.tf = _LOCAL_FILES
    try:
        yield
    finally:
        for module, tf in zip(modules, kept, strict=True):
            module.tf = tf


def _sorted_glob(pattern: str) -> list[str]:
    return sorted(glob.glob(pattern))


_LOCAL_FILES = types.SimpleNamespace(
    io=types.SimpleNamespace(gfile=types.SimpleNamespace(GFile=open, glob=_sorted_glob)),
    compat=types.SimpleNamespace(as_text=str),
)
