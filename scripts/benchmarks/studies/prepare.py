"""Measures `meshloom prepare` on a synthetic text of any size: its speed and its memory.

    python -m scripts.benchmarks.studies.prepare --megabytes=2000 --workers=2

The text has words of a Zipf distribution in lines of 5 to 45 words.  The memory is that of all
processes of the command together, each shared page counted once, sampled every half second.
"""

import os
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from scripts.benchmarks.options import Count, JsonFlags
from scripts.benchmarks.rounds import cores, show
from scripts.command_line import run_command

WORDS = 50_000
BLOCK = 1_000_000  # words


def write_text(path: Path, megabytes: int) -> None:
    """Writes a text that is always the same."""
    random = np.random.default_rng(0)
    letters = np.array(list("etaoinshrdlucmfwygpbvk"))
    sizes = random.integers(1, 12, WORDS)
    words = np.array(["".join(random.choice(letters, size)) for size in sizes], object)
    shares = 1 / np.arange(1, WORDS + 1)
    with path.open("w") as file:
        while file.tell() < megabytes * 1_000_000:
            block = words[random.choice(WORDS, BLOCK, p=shares / shares.sum())]
            ends = np.cumsum(random.integers(5, 46, BLOCK // 25))
            lines = (" ".join(line) for line in np.split(block, ends[ends < BLOCK]))
            file.write("\n".join(lines) + "\n")


def measure(text: Path, data_dir: Path, workers: int) -> dict[str, Any]:
    """Prepares a text in a process of its own, and returns its speed and memory."""
    flags = [
        f"--data_dir={data_dir}", f"--workers={workers}", "--gin_file=configs/tasks/text.gin",
        "--gin_param=Task.name='synthetic'", f"--gin_param=TextFiles.train='{text}'",
    ]  # fmt: skip
    before, start, peak = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter(), 0
    process = subprocess.Popen([sys.executable, "-m", "scripts.meshloom", "prepare", *flags])
    while process.poll() is None:
        peak = max(peak, memory_bytes(process.pid))
        time.sleep(0.5)
    if process.returncode:
        sys.exit(process.returncode)
    seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = sum(getattr(after, name) - getattr(before, name) for name in ("ru_utime", "ru_stime"))
    megabytes = text.stat().st_size / 1e6
    return {
        "megabytes": megabytes,
        "workers": workers,
        "prepare_s": seconds,
        "megabytes_a_minute": megabytes / seconds * 60,
        "cpu_s": cpu_s,
        "megabytes_a_minute_of_cpu": megabytes / cpu_s * 60,
        "peak_memory_bytes": peak,
        "cores": cores(),
        "load": os.getloadavg()[0],
    }


def memory_bytes(process: int) -> int:
    """Returns the memory of a process and those below it."""
    total = 0
    try:
        rollup = Path(f"/proc/{process}/smaps_rollup").read_text()
        total += 1024 * next(int(s.split()[1]) for s in rollup.splitlines() if s[:4] == "Pss:")
        for task in Path(f"/proc/{process}/task").iterdir():
            total += sum(map(memory_bytes, map(int, (task / "children").read_text().split())))
    except (OSError, StopIteration):  # it has ended
        pass
    return total


@dataclass(frozen=True, kw_only=True)
class Flags(JsonFlags):
    """Measures the speed and the memory of `meshloom prepare`."""

    megabytes: Count = 300
    """Size of the text."""
    workers: Count = 2
    """Processes that tokenize and pack."""


def study(flags: Flags) -> None:
    """Writes a text, and measures how it is prepared."""
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder, "text.txt")
        write_text(text, flags.megabytes)
        show(measure(text, Path(folder, "data"), flags.workers), flags.json_file)


if __name__ == "__main__":
    run_command(Flags, study)
