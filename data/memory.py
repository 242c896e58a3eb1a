"""Returns freed memory to the operating system."""

import contextlib
import ctypes


def trim_memory() -> None:
    """Returns freed memory; glibc would keep blocks of up to 32 MB for reuse."""
    with contextlib.suppress(OSError, AttributeError):  # with another C library
        ctypes.CDLL(None).malloc_trim(0)
