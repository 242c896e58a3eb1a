"""Sources of text: each yields the lines of a split, one example a line."""

import hashlib
from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

from configs.errors import UserError
from configs.spec import spec
from data import docstrings, text_files, tfds_lines

SPLITS = ("train", "validation", "test")
Files = str | tuple[str, ...]


@runtime_checkable
class Source(Protocol):
    """What a task reads its text from."""

    def splits(self) -> tuple[str, ...]:
        """Names the splits that this source has."""

    def lines(self, split: str) -> Iterator[str]:
        """Yields the examples of a split, always in the same order."""

    def fingerprint(self) -> dict[str, Any]:
        """Tells cheaply, without reading the text, whether it may have changed."""


@spec
class Docstrings:
    """English prose from the docstrings of the installed Python library, numpy and jax."""

    def splits(self) -> tuple[str, ...]:
        return SPLITS

    def lines(self, split: str) -> Iterator[str]:
        return iter(docstrings.corpus()[split])

    def fingerprint(self) -> dict[str, Any]:
        return docstrings.versions()


@spec
class TextFiles:
    """Text files, plain, .gz or .xz, named by paths or globs; one example a line.

    Without validation files, about validation_fraction of the training lines are held out, chosen
    by a hash of the line, so that equal lines never fall on both sides.  Blank lines are no
    examples.
    """

    train: Files
    validation: Files | None = None
    test: Files | None = None
    validation_fraction: float = 0.02

    def __post_init__(self) -> None:
        if not 0 < self.validation_fraction < 0.5:
            raise UserError(
                f"TextFiles.validation_fraction = {self.validation_fraction}: it must lie "
                "between 0 and 0.5.  To have no held-out lines, name TextFiles.validation."
            )

    def splits(self) -> tuple[str, ...]:
        return SPLITS if self.test is not None else SPLITS[:2]

    def lines(self, split: str) -> Iterator[str]:
        held_out = self.validation is None and split == "validation"
        name = "train" if held_out else split
        examples = text_files.read_examples(self._files(name), f"TextFiles.{name}")
        if self.validation is None and split != "test":
            examples = (x for x in examples if self._holds_out(x) == held_out)
        return examples

    def fingerprint(self) -> dict[str, Any]:
        named = [s for s in SPLITS if getattr(self, s) is not None]
        return {split: text_files.stamps(self._files(split)) for split in named}

    def _files(self, split: str) -> list[str]:
        return text_files.expand(getattr(self, split), f"TextFiles.{split}")

    def _holds_out(self, line: str) -> bool:
        place = int.from_bytes(hashlib.blake2b(line.encode(), digest_size=8).digest(), "big")
        return place < self.validation_fraction * 2**64


@spec
class Tfds:
    """A TFDS data set with one text feature, made by its own builder as ArrayRecord files.

    A split is any TFDS split expression, such as "train[1000:]".  folder is TFDS's data_dir; archives
    is a folder with archives that were downloaded by hand, which TFDS then checks and unpacks.
    """

    name: str
    feature: str = "text"
    train: str = "train"
    validation: str | None = None
    test: str | None = None
    folder: str | None = None
    archives: str | None = None

    def splits(self) -> tuple[str, ...]:
        return tuple(s for s in SPLITS if getattr(self, s) is not None)

    def lines(self, split: str) -> Iterator[str]:
        return tfds_lines.lines(
            self.name, self.folder, self.archives, getattr(self, split), self.feature
        )

    def fingerprint(self) -> dict[str, Any]:
        return tfds_lines.stamps(self.name, self.folder, self.archives)
