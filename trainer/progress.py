"""Reports the progress of long work to its caller."""

from collections.abc import Callable

Progress = Callable[[int, int], None]
"""Is called with the parts of the work that are done, and with all."""


def no_progress(done: int, total: int) -> None:
    """Shows nothing."""
