"""Defines what the data tests share: log lines, and the pairs of a source."""

import contextlib
import logging
from collections.abc import Iterator

import pytest

from data.sources.pairs import Pair, Pairs, tagged


class LineHandler(logging.Handler):
    """Keeps the text of each log record."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@contextlib.contextmanager
def kept_log_lines() -> Iterator[list[str]]:
    """Yields a list of the lines that `data` logs, as they come."""
    handler, logger = LineHandler(), logging.getLogger("data")
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        yield handler.lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


@pytest.fixture
def log_lines() -> Iterator[list[str]]:
    with kept_log_lines() as lines:
        yield lines


def pairs_of(source: Pairs, split: str) -> Iterator[Pair]:
    """Yields the pairs of a split as a model reads them, each source line with its tag."""
    for part in source.parts_of(split).values():
        for text, target in part.untagged(split):
            yield Pair(tagged(text, part.tag), target)
