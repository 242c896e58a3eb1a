"""Reads TFDS data sets without TensorFlow, from ArrayRecord files that it makes."""

import contextlib
import glob
import importlib
import importlib.util
import itertools
import re
import sys
import types
from collections.abc import Iterator, Sequence
from typing import Any

from configs.errors import UserError, did_you_mean, extra_required
from configs.paths import local_path
from configs.spec import abstract_spec, spec
from data.sources.pairs import Pair, Pairs
from data.sources.text import SPLITS, Source
from data.sources.text_files import PLACE, decoded

_RECORDS_PER_READ = 1024


@abstract_spec
class TfdsSource(Source):
    """Reads a TFDS data set, made by its own builder as ArrayRecord files."""

    name: str
    """Name of the TFDS dataset, such as "lm1b" or "wmt14_translate/de-en"."""
    train: str = "train"
    """A TFDS split expression, such as "train[1000:]", as for validation and test."""
    folder: str | None = None
    """TFDS's data_dir. None: ~/tensorflow_datasets."""
    archives: str | None = None
    """A folder with manually downloaded archives, which TFDS checks and unpacks."""

    def splits(self) -> tuple[str, ...]:
        return tuple(s for s in SPLITS if getattr(self, s) is not None)

    def fingerprint(self) -> dict[str, Any] | None:
        """Returns a data set's version and the records of its splits; None before it is made."""
        info = self._builder().info
        splits = {name: list(split.shard_lengths) for name, split in info.splits.items()}
        return {"name": info.full_name, **splits} if splits else None

    def texts(self, split: str, parameters: Sequence[str], errors: str) -> Iterator[list[str]]:
        """Yields the text features that the settings in `parameters` name, record by record.

        errors is how `bytes.decode` handles bytes that are not UTF-8.
        """
        builder, kind = self._prepared_builder(), type(self).__name__
        features = [getattr(self, name) for name in parameters]
        legal = sorted(builder.info.features)
        for parameter, feature in zip(parameters, features, strict=True):
            if feature not in legal:
                raise UserError(
                    f"{kind}.{parameter} = {feature!r}: {builder.name} has no such feature.  "
                    f"Its features: {', '.join(legal)}."
                )
        split = getattr(self, split)
        try:
            records = builder.as_data_source(split=split)
        except ValueError as error:
            raise UserError(
                f"{kind}: split {split!r} of {self.name}: {error}  "
                f"Its splits: {', '.join(builder.info.splits)}."
            ) from None
        for start in range(0, len(records), _RECORDS_PER_READ):
            stop = min(start + _RECORDS_PER_READ, len(records))
            for number, record in enumerate(records.__getitems__(range(start, stop)), start + 1):
                place = f"{self.name}, split {split!r}, record {number:,}"
                PLACE.set((f"{self.name}/{split}", number))
                yield [
                    decoded(record[feature], f"{kind}.{name} = {feature!r}: {place}", errors)
                    for name, feature in zip(parameters, features, strict=True)
                ]

    def _prepared_builder(self) -> Any:
        """Returns TFDS's builder of a data set; downloads and writes ArrayRecord files first."""
        builder, kind = self._builder(), type(self).__name__
        import tensorflow_datasets as tfds
        from tensorflow_datasets.core.download.download_manager import NonMatchingChecksumError

        tfds.disable_progress_bar()  # it redraws over the caller's own
        config = tfds.download.DownloadConfig(manual_dir=self.archives)
        try:
            with _files_without_tensorflow(builder):
                builder.download_and_prepare(download_config=config)
        except (OSError, tfds.download.DownloadError, NonMatchingChecksumError) as error:
            files = ", ".join(info.filename for info in builder.url_infos.values() if info.filename)
            first_line = str(error).partition("\n")[0]
            raise UserError(
                f"{kind}.name = {builder.name!r}: could not be downloaded or written to "
                f"{builder.data_dir} ({first_line}).  Without network access, copy its archives "
                f"({files}) into a folder and set {kind}.archives to that folder."
            ) from error
        return builder

    def _builder(self) -> Any:
        kind = type(self).__name__
        with extra_required("tfds", f"@{kind}()"):
            import tensorflow_datasets as tfds  # takes 0.8 s: only if needed
        if self.folder is not None:
            local_path(self.folder, f"{kind}.folder")
        if re.match(r"\w+:[a-zA-Z_]", self.name):
            raise UserError(
                f"{kind}.name = {self.name!r}: a community dataset, whose code TFDS would download "
                "and run.  Legal: a dataset of TFDS itself."
            )
        # TFDS does not import some builders by itself, such as those of WMT.
        stem = self.name.partition("/")[0].removesuffix("_translate")
        for package in ("translate", "text"):
            module = f"tensorflow_datasets.{package}.{stem}"
            if stem.isidentifier() and importlib.util.find_spec(module):
                importlib.import_module(module)
        try:
            return tfds.builder(self.name, data_dir=self.folder, file_format="array_record")
        except (tfds.core.DatasetNotFoundError, ValueError) as error:
            data_set = self.name.partition("/")[0]
            try:
                legal = ", ".join(tfds.builder_cls(data_set).builder_configs) or "none"
                first_line = str(error).partition("\n")[0]
                problem = f"{first_line}  The configurations of {data_set}: {legal}."
            except (tfds.core.DatasetNotFoundError, ValueError):
                known = tfds.list_builders(with_community_datasets=False)
                problem = f"TFDS has no such dataset.{did_you_mean(self.name, known)}"
            raise UserError(f"{kind}.name = {self.name!r}: {problem}") from None


@spec
class Tfds(TfdsSource):
    """Reads a TFDS dataset with a text feature, which its builder wrote as ArrayRecord files."""

    feature: str = "text"
    """Feature that holds the text."""
    validation: str | None = None
    """Split expression of the validation text. None: no validation split."""
    test: str | None = None
    """Split expression of the test text. None: no test split."""

    def lines(self, split: str) -> Iterator[str]:
        """Yields the feature of each record; line breaks inside it become spaces."""
        for [text] in self.texts(split, ["feature"], "strict"):
            if text.strip():
                yield text.replace("\n", " ")


@spec
class TfdsPairs(TfdsSource, Pairs):
    """Reads a TFDS dataset of translations, which its builder wrote as ArrayRecord files."""

    source_field: str
    """The feature to translate; TFDS names features by language, such as "en"."""
    target_field: str
    """Name of the field that holds the translation."""
    validation: str | None = "validation"
    """Validation pairs."""
    test: str | None = "test"
    """Test pairs."""

    def read(self, split: str, errors: str = "strict") -> Iterator[Pair]:
        return itertools.starmap(Pair, self.texts(split, ["source_field", "target_field"], errors))


@contextlib.contextmanager
def _files_without_tensorflow(builder: Any) -> Iterator[None]:
    """Replaces the three TensorFlow functions that TFDS needs while it unpacks archives.

    TFDS 4.9 writes ArrayRecord files without TensorFlow, but its archive reader and some builders,
    such as lm1b, open and list local files through `tf.io.gfile`.
    """
    if importlib.util.find_spec("tensorflow"):
        yield
        return
    from tensorflow_datasets.core.download import extractor

    candidates: list[Any] = [extractor, sys.modules[type(builder).__module__]]
    with contextlib.ExitStack() as stack:
        for module in (module for module in candidates if hasattr(module, "tf")):
            stack.callback(setattr, module, "tf", module.tf)
            module.tf = _LOCAL_FILES
        yield


_GFILE = types.SimpleNamespace(GFile=open, glob=lambda pattern: sorted(glob.glob(pattern)))
_LOCAL_FILES = types.SimpleNamespace(
    io=types.SimpleNamespace(gfile=_GFILE), compat=types.SimpleNamespace(as_text=str)
)
