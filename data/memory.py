"""Gives memory back to the system."""

import contextlib
import ctypes


def trim_memory() -> None:
    """Gives back what is free: glibc keeps arrays of less than 32 MB for later ones."""
    with contextlib.suppress(OSError, AttributeError):  # of another C library
        ctypes.CDLL(None).malloc_trim(0)
