"""Returns freed memory to the operating system."""

import contextlib
import ctypes


def trim_memory() -> None:
    """Returns freed memory, of which glibc keeps blocks of up to 32 MB for reuse."""
    with contextlib.suppress(OSError, AttributeError):  # of another C library
        ctypes.CDLL(None).malloc_trim(0)
