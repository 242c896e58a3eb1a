"""Reads pairs from the kinds of sources that a task file can name."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Annotated, Any, ClassVar

from pydantic import Field

from configs.errors import UserError, extra_required
from configs.spec import Count, CountOrZero, Seed, abstract_spec, spec
from data.sources import mixing, text_files
from data.sources.pairs import LANGUAGE, Pair, Pairs, Preference
from data.sources.text import SPLITS, Files, FileSource


@abstract_spec
class HeldOutPairs(FileSource, Pairs):
    """Reads pairs from files; subclasses define the parameters that name them."""

    def read(self, split: str, errors: str = "strict") -> Iterator[Pair]:
        return self.read_split(split, errors, lambda pair: pair.target)

    def read_prompts(self, split: str, errors: str = "strict") -> Iterator[Pair]:
        return self.read_split(split, errors, lambda pair: pair.source)


@abstract_spec
class FilePairs(HeldOutPairs):
    """Reads pairs from files that hold both sides; a task file names one of its kinds."""

    train: Files
    """One or several paths or globs, as for validation and test."""
    validation: Files | None = None
    """Validation pairs."""
    test: Files | None = None
    """Test pairs."""


@abstract_spec
class Preferences(FilePairs):
    """Reads a prompt, the answer that is preferred and the one that is rejected."""

    has_rejected: ClassVar[bool] = True
    texts: ClassVar[Callable[..., Iterator[list[str]]]]
    """Yields the texts with some names, row by row."""

    prompt: str = "prompt"
    """Name of the field or column that holds the prompt; a dot selects a nested field."""
    chosen: str = "chosen"
    """Name of the field or column that holds the preferred answer."""
    rejected: str = "rejected"
    """Name of the field or column that holds the rejected answer."""

    def read_files(self, paths: Sequence[str], setting: str, errors: str) -> Iterator[Any]:
        names = [self.prompt, self.chosen, self.rejected]
        return itertools.starmap(Preference, self.texts(paths, names, setting, errors))


@spec
class ParallelFiles(HeldOutPairs):
    """Reads pairs of files; line n of one is the translation of line n of the other.

    Files may be plain, .gz, .xz or .zst.
    """

    train_source: Files | None = None
    """One or several paths or globs, as for the next five settings. Optional in a mixture."""
    train_target: Files | None = None
    """Translations of the training sources."""
    validation_source: Files | None = None
    """Validation sources."""
    validation_target: Files | None = None
    """Translations of the validation sources."""
    test_source: Files | None = None
    """Test sources."""
    test_target: Files | None = None
    """Translations of the test sources."""

    def __post_init__(self) -> None:
        for split in SPLITS:
            if len(self.files(split)) == 1:
                [given] = self.files(split)
                [missing] = set(self.parameters(split)) - {given}
                raise UserError(
                    f"ParallelFiles.{given} is set, and ParallelFiles.{missing} is not.  "
                    "Give both or none."
                )
        if not self.splits():
            raise UserError(
                "ParallelFiles: no files.  Give ParallelFiles.train_source and train_target."
            )

    def parameters(self, split: str) -> tuple[str, ...]:
        return f"{split}_source", f"{split}_target"

    def read_named(self, split: str, errors: str) -> Iterator[Pair]:
        given = self.files(split).items()
        sources, targets = (text_files.named(f, f"ParallelFiles.{name}") for name, f in given)
        if len(sources) == len(targets):  # a file may be the source of two others
            pairs = zip(sources, targets, strict=True)
            by_file = {tuple(map(text_files.identity, pair)): pair for pair in pairs}
            sources, targets = map(list, zip(*by_file.values(), strict=True))
        else:
            sources, targets = text_files.distinct(sources), text_files.distinct(targets)
        setting = f"ParallelFiles.{split}_source"
        if len(sources) != len(targets):
            raise UserError(
                f"{setting}: {len(sources)} source files and {len(targets)} target files "
                f"({', '.join(sources)} and {', '.join(targets)}).  Give a target file per source."
            )
        read = functools.partial(_aligned, setting=setting, errors=errors)
        return text_files.of_files(sources, map(read, sources, targets), setting, "line of text")


def _aligned(source: str, target: str, setting: str, errors: str) -> Iterator[Pair]:
    """Yields the lines of a source file, each with the same line of the target file."""
    counts = [0, 0]
    files = (text_files.read_lines(path, errors) for path in (source, target))
    for lines in itertools.zip_longest(*files):
        counts = [count + (line is not None) for count, line in zip(counts, lines, strict=True)]
        if None not in lines:
            yield Pair(*lines)
    if counts[0] != counts[1]:
        raise UserError(
            f"{setting}: {source} has {counts[0]:,} lines and {target} has {counts[1]:,}.  Line n "
            "of one must be the translation of line n of the other: find where they diverge."
        )


@spec
class Tsv(FilePairs):
    """Reads files of tab-separated columns, plain, .gz, .xz or .zst; one pair per line."""

    source_column: CountOrZero = 0
    """Column of the source, counted from 0."""
    target_column: CountOrZero = 1
    """Column of the translation, counted from 0."""

    def read_files(self, paths: Sequence[str], setting: str, errors: str) -> Iterator[Pair]:
        def pairs(path: str) -> Iterator[Pair | None]:
            for number, line in enumerate(text_files.read_lines(path, errors), 1):
                if not line.strip():
                    yield None
                    continue
                columns = line.split("\t")
                if len(columns) <= max(self.source_column, self.target_column):
                    raise UserError(
                        f"{path}, line {number}: {len(columns)} columns, and {setting} needs "
                        f"columns {self.source_column} and {self.target_column}, counted from 0.  "
                        "A tab separates columns."
                    )
                yield Pair(columns[self.source_column], columns[self.target_column])

        return text_files.of_files(paths, map(pairs, paths), setting, "line of text")


@spec
class Phrases(Pairs):
    """Generates dates, numbers, names and so on in two languages, from locale data and a seed."""

    language: str = "de"
    """Language of the source, such as de."""
    target_language: str = "en"
    """Language of the target."""
    train: Count = 40_000
    """Number of training pairs."""
    held_out: Count = 1_000
    """Number of pairs in validation and in test, each. Their sources do not occur in training."""
    seed: Seed = 0
    """Seed of the random choices."""

    def read(self, split: str, errors: str = "strict") -> Iterator[Pair]:
        settings = self.language, self.target_language, self.seed, self.train, self.held_out
        return itertools.starmap(Pair, _import_phrases().corpus(*settings)[split])

    def fingerprint(self) -> dict[str, str]:
        return _import_phrases().versions()


def _import_phrases() -> ModuleType:
    """Imports the corpus only if it is read: this takes 0.2 s, and needs an extra's packages."""
    with extra_required("phrases", "@Phrases()"):
        from data.corpora import phrases
    return phrases


@spec
class Mixture(mixing.MixedSource, Pairs):
    """Mixes several sources; the settings choose the rate of each part in a batch.

    Each part is packed into its own rows; rates and sizes count rows.
    """

    parts: Annotated[tuple[Pairs, ...], Field(min_length=1)]
    """Sources to mix. In a gin file, each has its own scope, as in (@de/Tsv(), @fr/Tsv())."""
    languages: tuple[str, ...] = ()
    """Repeats each part for each of these languages, and names it after the language. The language
    replaces "{language}" in its settings, as in Tsv.train = "{language}-eng.tsv"."""

    @property
    def all_parts(self) -> tuple[Pairs, ...]:
        """Returns the parts, repeated for each language if there are any."""
        if not self.languages:
            return self.parts
        return tuple(_spoken(part, one) for one in self.languages for part in self.parts)

    @property
    def tags(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(tag for part in self.all_parts for tag in part.tags))

    def problems(self) -> Iterator[str]:
        if any(isinstance(part, Mixture) for part in self.parts):
            yield "Mixture.parts: a part is itself a mixture.  List its parts here instead."
        for setting in ("name", "tag"):
            if value := getattr(self, setting):
                yield f"Mixture.{setting} = {value!r}: legal: None.  Set it in each part."
        if twice := sorted({x for x in self.languages if self.languages.count(x) > 1}):
            yield f"Mixture.languages: {', '.join(twice)} occurs twice.  List each once."
            return
        if 0 < sum(part.tag is not None for part in self.parts) < len(self.parts):
            tags = ", ".join(str(part.tag) for part in self.parts)
            yield f"Mixture.parts: their tags are {tags}.  Give each part a tag, or none."
        for part in self.parts if self.languages else ():
            if part == dataclasses.replace(_spoken(part, "any"), name=part.name):
                kind = type(part).__name__
                yield (
                    f"Mixture.languages: @{kind}() reads the same for each of them.  "
                    f'Write "{LANGUAGE}" where its settings name a language.'
                )
        yield from self.name_problems(*SPLITS)


def _spoken(part: Pairs, language: str) -> Pairs:
    """Returns a part with "{language}" replaced by a language."""

    def filled(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(filled, value))
        return value.replace(LANGUAGE, language) if isinstance(value, str) else value

    fields = {field.name: filled(getattr(part, field.name)) for field in dataclasses.fields(part)}
    return dataclasses.replace(part, **{**fields, "name": fields["name"] or language})
