"""Reads pairs from line-aligned files and from tables with tabs."""

import itertools
from collections.abc import Generator, Iterator, Sequence

from configs.errors import UserError
from data.sources.pairs import Pair
from data.sources.text_files import check_empty, read_lines


def aligned(
    sources: Sequence[str], targets: Sequence[str], setting: str, errors: str
) -> Iterator[Pair]:
    """Yields line by line what stands in source files and in the target files beside them."""
    if len(sources) != len(targets):
        raise UserError(
            f"{setting}: {len(sources)} source files and {len(targets)} target files "
            f"({', '.join(sources)} and {', '.join(targets)}).  Give a target file per source."
        )
    empty = []
    for source, target in zip(sources, targets, strict=True):
        count = yield from _aligned(source, target, setting, errors)
        empty += [] if count else [source]
    check_empty(setting, sources, empty, "line of text")


def _aligned(source: str, target: str, setting: str, errors: str) -> Generator[Pair, None, int]:
    """Yields the pairs of two files, and returns how many there are."""
    counts = [0, 0]
    for lines in itertools.zip_longest(read_lines(source, errors), read_lines(target, errors)):
        counts = [count + (line is not None) for count, line in zip(counts, lines, strict=True)]
        if None not in lines:
            yield Pair(*lines)
    if counts[0] != counts[1]:
        raise UserError(
            f"{setting}: {source} has {counts[0]:,} lines and {target} has {counts[1]:,}.  Line n "
            "of one must be the translation of line n of the other: find where they diverge."
        )
    return counts[0]


def table(
    paths: Sequence[str], setting: str, source_column: int, target_column: int, errors: str
) -> Iterator[Pair]:
    """Yields two columns of files with a tab between columns; blank lines are no pairs."""
    empty = []
    for path in paths:
        number = 0
        for number, line in _numbered(path, errors):
            columns = line.split("\t")
            if len(columns) <= max(source_column, target_column):
                raise UserError(
                    f"{path}, line {number}: {len(columns)} columns, and {setting} needs "
                    f"columns {source_column} and {target_column}, counted from 0.  "
                    "A tab separates columns."
                )
            yield Pair(columns[source_column], columns[target_column])
        empty += [] if number else [path]
    check_empty(setting, paths, empty, "line of text")


def _numbered(path: str, errors: str) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(read_lines(path, errors), 1):
        if line and not line.isspace():
            yield number, line
