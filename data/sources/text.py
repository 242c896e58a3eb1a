"""Defines sources of text: each yields the examples of a split."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from configs.errors import UserError
from configs.spec import Described, abstract_spec, spec
from data.corpora import docstrings
from data.mixture import MixtureOrder
from data.sources import text_files, tfds
from data.storage import remote

SPLITS = ("train", "validation", "test")
Files = str | tuple[str, ...]
PartName = Annotated[
    str,
    Field(pattern=r"^[A-Za-z0-9_.-]+$"),
    Described("of letters from A to Z or a to z, digits, '_', '.' and '-'"),
]
HeldOutFraction = Annotated[float, Field(gt=0, lt=0.5)]


def is_held_out(text: str, fraction: float) -> bool:
    """Returns whether a text is among the fraction of all texts that a hash holds out."""
    raw = text.encode("utf-8", "surrogatepass")
    place = int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "big")
    return place < fraction * 2**64


def file_remedies(
    kind: str, split: str, parameters: Sequence[str], held_out: float | None
) -> Sequence[str]:
    """Names the settings of a source of files that give more examples to a split; held_out is the
    share of the training text that is held out to validate, if it is.

    >>> file_remedies("Tsv", "validation", ("validation",), 0.02)
    ('a Tsv.validation_fraction above 0.02', 'files of its own (Tsv.validation)')
    """
    names = " and ".join(f"{kind}.{parameter}" for parameter in parameters)
    if split == "validation" and held_out is not None:
        fraction = f"a {kind}.validation_fraction above {held_out:g}"
        return (fraction, f"files of its own ({names})")
    return (f"other files ({names})",)


@abstract_spec
class Source:
    """Reads the text of a task; a task file names one of its kinds."""

    def splits(self) -> tuple[str, ...]:
        """Names the splits that this source has."""
        raise NotImplementedError

    def lines(self, split: str) -> Iterator[str]:
        """Yields the examples of a split as they stand in the text, always in the same order."""
        raise NotImplementedError

    def fingerprint(self) -> dict[str, Any] | None:
        """Returns a cheap fingerprint that changes with the text; None where it is not at hand."""
        raise NotImplementedError

    def bytes_to_read(self, split: str) -> int | None:
        """Returns the size of the files that hold a split; None where there are none to measure."""
        return None

    def remedies(self, split: str) -> Sequence[str]:
        """Describes which settings would give more examples to a split that has none."""
        return ()

    @property
    def has_newlines(self) -> bool:
        """Returns whether an example may hold newlines; otherwise each is a line."""
        return False

    @property
    def part_name(self) -> str | None:
        """Returns the name that the settings give to this part of a mixture."""
        return None

    def parts_of(self, split: str) -> Mapping[str, "Source"]:
        """Names the sources that this one mixes in a split; just itself if it is not a mixture."""
        return {type(self).__name__: self}

    def mix(self, rows: Sequence[int]) -> MixtureOrder | None:
        """Returns the rates of the parts in training, given the number of rows of each."""
        return None


@spec
class Docstrings(Source):
    """Reads English prose from the docstrings of the installed Python library, numpy and jax."""

    def splits(self) -> tuple[str, ...]:
        return SPLITS

    def lines(self, split: str) -> Iterator[str]:
        return iter(docstrings.corpus()[split])

    def fingerprint(self) -> dict[str, Any]:
        return docstrings.versions()


@abstract_spec
class FileText(Source):
    """Reads text from files; a task file names one of its kinds."""

    train: Files
    """One or several paths or globs, as are validation and test."""
    validation: Files | None = None
    """Validation text. None: a share of the training text."""
    test: Files | None = None
    """Test text. None: no test split."""
    validation_fraction: HeldOutFraction = 0.02
    """Approximate share of the training text that is held out if there are no validation files. A
    hash of the example selects it, so that equal examples are never in both splits."""
    name: PartName | None = None
    """Name of a part of a mixture in results. None: its kind."""

    @property
    def part_name(self) -> str | None:
        return self.name

    def splits(self) -> tuple[str, ...]:
        return SPLITS if self.test is not None else SPLITS[:2]

    def bytes_to_read(self, split: str) -> int | None:
        held_out = self.validation is None and split == "validation"
        return text_files.total_bytes(self._files("train" if held_out else split))

    def lines(self, split: str) -> Iterator[str]:
        held_out = self.validation is None and split == "validation"
        name = "train" if held_out else split
        examples = self.read_files(self._files(name), f"{type(self).__name__}.{name}")
        if self.validation is None and split != "test":
            examples = (x for x in examples if self._holds_out(x) == held_out)
        return examples

    def remedies(self, split: str) -> Sequence[str]:
        fraction = self.validation_fraction if self.validation is None else None
        return file_remedies(type(self).__name__, split, (split,), fraction)

    def fingerprint(self) -> dict[str, Any] | None:
        named = [s for s in SPLITS if getattr(self, s) is not None]
        try:
            return {split: text_files.stamps(self._files(split)) for split in named}
        except (UserError, OSError) as error:
            remote.raise_failure(error)
            return None

    def read_files(self, paths: Sequence[str], setting: str) -> Iterator[str]:
        """Yields the examples of some files; setting names them in an error."""
        raise NotImplementedError

    def _files(self, split: str) -> list[str]:
        return text_files.expand(getattr(self, split), f"{type(self).__name__}.{split}")

    def _holds_out(self, line: str) -> bool:
        return is_held_out(text_files.without_carriage_return(line), self.validation_fraction)


@spec
class TextFiles(FileText):
    """Reads text files, plain, .gz, .xz or .zst."""

    example: Literal["line", "any line", "paragraph", "file"] = "line"
    """What an example is: a line that is not blank, any line (of a blank one, the model predicts
    the end), a paragraph, which blank lines separate, or a whole file that is not blank."""

    @property
    def has_newlines(self) -> bool:
        return self.example in ("paragraph", "file")

    def read_files(self, paths: Sequence[str], setting: str) -> Iterator[str]:
        match self.example:
            case "line" | "any line" as kind:
                return text_files.read_examples(paths, setting, with_blank=kind == "any line")
            case "paragraph":
                return text_files.with_text(text_files.read_paragraphs(paths), setting, "paragraph")
            case "file":
                return text_files.with_text(text_files.read_whole(paths), setting, "file")


@spec
class Tfds(Source):
    """Reads a TFDS data set with a text feature, made by its own builder as ArrayRecord files."""

    name: str
    """Name of the TFDS data set."""
    feature: str = "text"
    """Feature that holds the text."""
    train: str = "train"
    """A TFDS split expression, such as "train[1000:]", as are validation and test."""
    validation: str | None = None
    """Split expression of the validation text. None: no validation split."""
    test: str | None = None
    """Split expression of the test text. None: no test split."""
    folder: str | None = None
    """TFDS's data_dir. None: ~/tensorflow_datasets."""
    archives: str | None = None
    """A folder with archives downloaded by hand, which TFDS then checks and unpacks."""

    def splits(self) -> tuple[str, ...]:
        return tuple(s for s in SPLITS if getattr(self, s) is not None)

    def lines(self, split: str) -> Iterator[str]:
        return tfds.lines(self.name, self.folder, self.archives, getattr(self, split), self.feature)

    def fingerprint(self) -> dict[str, Any] | None:
        return tfds.stamps("Tfds", self.name, self.folder)
