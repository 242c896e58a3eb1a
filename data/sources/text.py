"""Defines sources of text, which yield the examples of a split."""

import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from configs.errors import UserError
from configs.paths import path_of
from configs.spec import Described, abstract_spec, spec
from data.corpora import docstrings
from data.mixture import MixtureOrder
from data.sources import text_files
from data.sources.compression import counted_bytes
from data.storage import lookup, remote

SPLITS = ("train", "validation", "test")
Files = str | tuple[str, ...]
PartName = Annotated[
    str,
    Field(pattern=r"^[A-Za-z0-9_.-]+$"),
    Described("of letters from A to Z or a to z, digits, '_', '.' and '-'"),
]


@abstract_spec
class Source:
    """Reads the text of a task; a task file names one of its kinds."""

    def splits(self) -> tuple[str, ...]:
        """Returns the splits that this source has."""
        return SPLITS

    def lines(self, split: str) -> Iterator[str]:
        """Yields the raw examples of a split, always in the same order."""
        raise NotImplementedError(f"{type(self).__name__} has no lines")

    def fingerprint(self) -> dict[str, Any] | None:
        """Returns a cheap fingerprint that changes with the text; None if the text is not there."""
        raise NotImplementedError(f"{type(self).__name__} has no fingerprint")

    def bytes_to_read(self, split: str) -> int | None:
        """Returns the size of the files that hold a split; None if there are none to measure."""
        return None

    def remedies(self, split: str) -> Sequence[str]:
        """Describes which settings would give examples to a split that has none."""
        return ()

    @property
    def has_newlines(self) -> bool:
        """Returns whether an example may contain newlines; otherwise each is a line."""
        return False

    @property
    def holds_out(self) -> bool:
        """Returns whether the validation split is taken from the training examples."""
        return False

    @property
    def name_and_label(self) -> tuple[str | None, str]:
        """Returns the name in the settings, if any, and the kind as a label."""
        return None, type(self).__name__

    def parts_of(self, split: str) -> dict[str, Any]:
        """Returns the sources that this one mixes in a split; itself if it is not a mixture."""
        name, label = self.name_and_label
        return {name or label: self}

    def mix(self, rows: Sequence[int]) -> MixtureOrder | None:
        """Returns the order of the parts in training, given each part's number of rows."""
        return None


@spec
class Docstrings(Source):
    """Reads English prose from the docstrings of the installed Python library, numpy and jax."""

    def lines(self, split: str) -> Iterator[str]:
        return iter(docstrings.corpus()[split])

    def fingerprint(self) -> dict[str, Any]:
        return docstrings.versions()


@abstract_spec
class FileSource(Source):
    """Reads files of text or of pairs; without validation files, it holds out some examples."""

    validation_fraction: Annotated[float, Field(gt=0, lt=0.5)] = 0.02
    """Approximate share of the training examples to hold out if there are no validation files. A
    hash of the text, of the target of a pair, or of the prompt of a PromptTask selects them, so
    that equal examples are never in both splits."""

    def parameters(self, split: str) -> tuple[str, ...]:
        """Returns the parameters that name files of a split."""
        return (split,)

    def files(self, split: str) -> dict[str, Files]:
        """Returns the paths or globs of a split by parameter; empty if there are none."""
        given = {name: getattr(self, name) for name in self.parameters(split)}
        return {name: value for name, value in given.items() if value is not None}

    def expanded(self, split: str) -> dict[str, list[str]]:
        """Returns the files of a split by parameter."""
        kind, files = type(self).__name__, self.files(split)
        return {name: text_files.expand(given, f"{kind}.{name}") for name, given in files.items()}

    @property
    def holds_out(self) -> bool:
        return not self.files("validation")

    def splits(self) -> tuple[str, ...]:
        named = [s for s in SPLITS if self.files(s)]
        return tuple(s for s in SPLITS if s in named or (s == "validation" and "train" in named))

    def read_split(self, split: str, errors: str, key: Callable[[Any], str]) -> Iterator[Any]:
        """Yields the examples of a split; a hash of their keys selects those that are held out."""
        if split == "test" or not self.holds_out:
            return self.read_named(split, errors)
        end, is_validation = self.validation_fraction * 2**64, split == "validation"

        def is_held_out(example: Any) -> bool:
            raw = key(example).encode("utf-8", "surrogatepass")
            return int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "big") < end

        with counted_bytes():  # apart from those of the split
            holds_out_all = all(map(is_held_out, self.read_named("train", errors)))
        if holds_out_all:  # all may have the same prompt
            return iter(()) if is_validation else self.read_named("train", errors)
        return (x for x in self.read_named("train", errors) if is_held_out(x) == is_validation)

    def read_named(self, split: str, errors: str) -> Iterator[Any]:
        """Yields the examples in the files that are named for a split."""
        paths = [*itertools.chain(*self.expanded(split).values())]
        return self.read_files(paths, f"{type(self).__name__}.{split}", errors)

    def read_files(self, paths: Sequence[str], setting: str, errors: str) -> Iterator[Any]:
        """Yields the examples of some files; `setting` names them in an error.

        errors is how `bytes.decode` handles bytes that are not UTF-8.
        """
        raise NotImplementedError(f"{type(self).__name__} has no read_files")

    def bytes_to_read(self, split: str) -> int | None:
        expanded = self.expanded(split if self.files(split) else "train")
        paths = itertools.chain(*expanded.values())
        return sum(lookup.size_of(path_of(path).expanduser()) for path in paths)

    def remedies(self, split: str) -> Sequence[str]:
        kind = type(self).__name__
        names = " and ".join(f"{kind}.{parameter}" for parameter in self.parameters(split))
        if not self.holds_out or split != "validation":
            return (f"other files ({names})",)
        fraction = f"a {kind}.validation_fraction above {self.validation_fraction:g}"
        return (f"files of its own ({names})", fraction)

    def fingerprint(self) -> dict[str, Any] | None:
        try:
            named = itertools.chain(*(self.expanded(split).items() for split in SPLITS))
            return {name: text_files.stamps(paths) for name, paths in named}
        except (UserError, OSError) as error:
            if not remote.is_offline(error):
                remote.raise_failure(error)
            return None


@abstract_spec
class FileText(FileSource):
    """Reads text from files; a task file names one of its kinds."""

    train: Files
    """One or several paths or globs, as for validation and test."""
    validation: Files | None = None
    """Validation text. None: a share of the training text."""
    test: Files | None = None
    """Test text. None: no test split."""
    name: PartName | None = None
    """Name of a part of a mixture in results. None: the kind of source."""

    @property
    def name_and_label(self) -> tuple[str | None, str]:
        return self.name, type(self).__name__

    def lines(self, split: str) -> Iterator[str]:
        return self.read_split(split, "strict", text_files.without_carriage_return)


@spec
class TextFiles(FileText):
    """Reads text files, plain, .gz, .xz or .zst."""

    example: Literal["line", "any line", "paragraph", "file"] = "line"
    """What an example is: a line that is not blank; any line (for a blank line, the model predicts
    the end); a paragraph, delimited by blank lines; or a whole file that is not blank."""

    @property
    def has_newlines(self) -> bool:
        return self.example in ("paragraph", "file")

    def read_files(self, paths: Sequence[str], setting: str, errors: str) -> Iterator[str]:
        if self.has_newlines:
            read = _paragraphs if self.example == "paragraph" else _whole_files
            return text_files.with_text(read(paths), setting, self.example)
        contents = map(text_files.read_raw_lines, paths)
        lines = text_files.of_files(paths, contents, setting, "line of text")
        return (line for line in lines if self.example == "any line" or line.strip())


def _paragraphs(paths: Sequence[str]) -> Iterator[str]:
    for path in paths:
        numbered = enumerate(text_files.read_lines(path), 1)
        for is_blank, group in itertools.groupby(numbered, lambda line: not line[1].strip()):
            if not is_blank:
                number, first = next(group)
                text = "\n".join([first, *(line for _, line in group)])
                text_files.PLACE.set((path, number))
                yield text


def _whole_files(paths: Sequence[str]) -> Iterator[str]:
    for path in paths:
        text = "\n".join(text_files.read_lines(path)).rstrip("\n")
        text_files.PLACE.set((path, 1))
        yield text
