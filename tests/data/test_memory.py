"""Freed memory goes back to the system."""

import platform
from pathlib import Path

import numpy as np
import pytest

from data.memory import trim_memory

SIZE = 64 << 10  # bytes: smaller than what glibc maps for itself


def used_bytes() -> int:
    (line,) = (x for x in Path("/proc/self/status").read_text().splitlines() if "RssAnon" in x)
    return 1024 * int(line.split()[1])


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other libraries keep other things")
def test_freed_arrays_are_given_back() -> None:
    trim_memory()  # of earlier tests, whose free memory these arrays would take
    before = used_bytes()
    arrays = [np.ones(SIZE, np.uint8) for _ in range(3000)]
    last = np.ones(SIZE, np.uint8)  # above the others in the heap, which then cannot shrink
    assert used_bytes() - before > 2900 * SIZE
    del arrays
    trim_memory()
    assert used_bytes() - before < 300 * SIZE and last.all()
