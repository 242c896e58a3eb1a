"""The kinds of pairs that a task file can name."""

from collections.abc import Iterator
from typing import Any

from configs.errors import UserError
from configs.spec import CountOrZero, spec
from data import pair_files, text_files
from data.pairs import Pair, Pairs
from data.source import SPLITS, Files, HeldOut, is_held_out


@spec
class FilePairs(Pairs):
    """What all kinds of pairs from files have in common; a task file names one of those."""

    validation_fraction: HeldOut = 0.02
    """About this share of the training pairs is held out where there are no validation files.  A
    hash of the target chooses, so that no target falls on both sides, whatever its source."""

    def splits(self) -> tuple[str, ...]:
        return tuple(s for s in SPLITS if s == "validation" or self.files(s))

    def read(self, split: str, errors: str = "strict") -> Iterator[Pair]:
        if split == "test" or self.files("validation"):
            yield from self.read_files(split, errors)
            return
        for pair in self.read_files("train", errors):
            if is_held_out(pair.target, self.validation_fraction) == (split == "validation"):
                yield pair

    def fingerprint(self) -> dict[str, Any] | None:
        named = [(name, f) for split in SPLITS for name, f in self.files(split).items()]
        try:
            return {name: text_files.stamps(self.expanded(name, files)) for name, files in named}
        except (UserError, OSError):
            return None

    def files(self, split: str) -> dict[str, Files]:
        """Returns what names the files of a split, by parameter; nothing where there are none."""
        given = {name: getattr(self, name) for name in self.parameters(split)}
        return {name: value for name, value in given.items() if value is not None}

    def parameters(self, split: str) -> tuple[str, ...]:
        """Names the parameters that name files of a split."""
        return (split,)

    def expanded(self, parameter: str, files: Files) -> list[str]:
        return text_files.expand(files, f"{type(self).__name__}.{parameter}")

    def read_files(self, split: str, errors: str) -> Iterator[Pair]:
        """Yields the pairs of the files that are named for a split."""
        raise NotImplementedError


@spec
class ParallelFiles(FilePairs):
    """Files of which line n of one is the translation of line n of the other.

    They are plain, .gz or .xz.
    """

    train_source: Files
    """One path or glob, or several; so are all that follow."""
    train_target: Files
    validation_source: Files | None = None
    validation_target: Files | None = None
    test_source: Files | None = None
    test_target: Files | None = None

    def __post_init__(self) -> None:
        for split in SPLITS:
            if len(self.files(split)) == 1:
                [given] = self.files(split)
                [missing] = set(self.parameters(split)) - {given}
                raise UserError(
                    f"ParallelFiles.{given} is set, and ParallelFiles.{missing} is not.  "
                    "Give both or none."
                )

    def parameters(self, split: str) -> tuple[str, ...]:
        return f"{split}_source", f"{split}_target"

    def read_files(self, split: str, errors: str) -> Iterator[Pair]:
        sources, targets = (self.expanded(*named) for named in self.files(split).items())
        return pair_files.aligned(sources, targets, f"ParallelFiles.{split}_source", errors)


@spec
class Tsv(FilePairs):
    """Files of columns with a tab between them, plain, .gz or .xz; one pair a line."""

    train: Files
    """One path or glob, or several; so are validation and test."""
    validation: Files | None = None
    test: Files | None = None
    source_column: CountOrZero = 0
    """Counted from 0; so is target_column."""
    target_column: CountOrZero = 1

    def read_files(self, split: str, errors: str) -> Iterator[Pair]:
        paths = self.expanded(split, self.files(split)[split])
        columns = (self.source_column, self.target_column)
        return pair_files.table(paths, f"Tsv.{split}", *columns, errors)


@spec
class Jsonl(FilePairs):
    """Files of one JSON object a line, plain, .gz or .xz; two of its fields make a pair."""

    train: Files
    """One path or glob, or several; so are validation and test."""
    validation: Files | None = None
    test: Files | None = None
    source_field: str
    """Its name; "translation.de" is the field de of the field translation."""
    target_field: str

    def read_files(self, split: str, errors: str) -> Iterator[Pair]:
        paths = self.expanded(split, self.files(split)[split])
        fields = (self.source_field, self.target_field)
        return pair_files.records(paths, f"Jsonl.{split}", *fields, errors)
