"""What long work tells its caller: how much of it is done."""

from collections.abc import Callable

Progress = Callable[[int, int], None]
"""Is called with the parts of the work that are done, and with all."""


def no_progress(done: int, total: int) -> None:
    """Shows nothing."""
