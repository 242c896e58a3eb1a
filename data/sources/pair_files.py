"""Reads pairs from line-aligned files and from tables with tabs."""

import functools
import itertools
from collections.abc import Iterator, Sequence

from configs.errors import UserError
from data.sources.pairs import Pair
from data.sources.text_files import of_files, read_lines


def aligned(
    sources: Sequence[str], targets: Sequence[str], setting: str, errors: str
) -> Iterator[Pair]:
    """Yields the lines of source files, each with the same line of the target file."""
    if len(sources) != len(targets):
        raise UserError(
            f"{setting}: {len(sources)} source files and {len(targets)} target files "
            f"({', '.join(sources)} and {', '.join(targets)}).  Give a target file per source."
        )
    read = functools.partial(_aligned, setting=setting, errors=errors)
    return of_files(sources, map(read, sources, targets), setting, "line of text")


def _aligned(source: str, target: str, setting: str, errors: str) -> Iterator[Pair]:
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


def table(
    paths: Sequence[str], setting: str, source_column: int, target_column: int, errors: str
) -> Iterator[Pair]:
    """Yields two columns of files with a tab between columns; blank lines are no pairs."""

    def pairs(path: str) -> Iterator[Pair]:
        for number, line in enumerate(read_lines(path, errors), 1):
            if not line.strip():
                continue
            columns = line.split("\t")
            if len(columns) <= max(source_column, target_column):
                raise UserError(
                    f"{path}, line {number}: {len(columns)} columns, and {setting} needs "
                    f"columns {source_column} and {target_column}, counted from 0.  "
                    "A tab separates columns."
                )
            yield Pair(columns[source_column], columns[target_column])

    return of_files(paths, map(pairs, paths), setting, "line of text")
