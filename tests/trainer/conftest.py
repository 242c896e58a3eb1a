"""Defines what the trainer tests share: type promotion for optax, and log lines."""

import logging
from collections.abc import Iterator

import pytest

from tests.toys import optax_promotion


class LineHandler(logging.Handler):
    """Keeps the text of each log record."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.fixture(scope="module", autouse=True)
def optax_types() -> Iterator[None]:
    with optax_promotion():
        yield


@pytest.fixture
def log_lines() -> Iterator[list[str]]:
    """Yields a list of the lines that the trainer logs, as they come."""
    handler = LineHandler()
    logger = logging.getLogger("trainer")
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    yield handler.lines
    logger.removeHandler(handler)
    logger.setLevel(level)
