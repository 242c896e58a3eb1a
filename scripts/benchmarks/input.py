"""Measures preparing text and reading batches, compared with what a training step needs.

    meshloom bench input --json=bench.json

Writes a synthetic text, prepares it by `meshloom prepare`, and reads its batches in the order of
training, as the loop does, but without a step between them.  The text has words of a Zipf
distribution in lines of 5 to 45 words.  The memory is that of all processes of the command
together, each shared page counted once, sampled every half second.
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

from scripts.benchmarks.rounds import CHECKOUT, MESHLOOM, Count, JsonFlags, cores, seconds, show

ROWS = 32  # of a batch
SETTINGS = """
include 'configs/tasks/text.gin'
Task.name = 'synthetic'
TextFiles.train = '{text}'
"""
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


def measure_prepare(gin_file: Path, data_dir: Path, workers: int) -> dict[str, float]:
    """Prepares a text in a process of its own, and returns its speed and memory."""
    flags = [f"--data_dir={data_dir}", f"--workers={workers}", f"--gin_file={gin_file}"]
    command = [*MESHLOOM, "prepare", *flags]
    before, start, peak = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter(), 0
    process = subprocess.Popen(command, cwd=CHECKOUT, stdout=sys.stderr)
    while process.poll() is None:
        peak = max(peak, memory_bytes(process.pid))
        time.sleep(0.5)
    if process.returncode:
        sys.exit(process.returncode)
    prepare_s, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = sum(getattr(after, name) - getattr(before, name) for name in ("ru_utime", "ru_stime"))
    return {"prepare_s": prepare_s, "cpu_s": cpu_s, "peak_memory_bytes": peak}


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
    """Measures how fast text is prepared, and batches are read."""

    megabytes: Count = 20
    """Size of the text."""
    workers: Count = 2
    """Processes that tokenize and pack."""
    batches: Count = 500
    """Batches to read."""


def benchmark(flags: Flags) -> None:
    """Writes a text, and measures how it is prepared and read."""
    import data.cache
    from configs.load import load
    from data.order import batches
    from scripts.commands.common import task_of

    with tempfile.TemporaryDirectory() as name:
        text, gin_file, data_dir = (Path(name, x) for x in ("text.txt", "text.gin", "data"))
        write_text(text, flags.megabytes)
        gin_file.write_text(SETTINGS.format(text=text))
        result: dict[str, Any] = measure_prepare(gin_file, data_dir, flags.workers)
        task = task_of(load([str(gin_file)], []))
        rows = data.cache.prepare(task, data_dir).splits["train"]
        reader = batches(rows, 0, ROWS, 0)
        next(reader)
        batch_s = seconds(lambda: [next(reader) for _ in range(flags.batches)]) / flags.batches
        result |= {"batch_s": batch_s, "read_tokens_per_s": ROWS * rows.length / batch_s}
        megabytes = text.stat().st_size / 1e6
    result["megabytes_a_minute"] = megabytes / result["prepare_s"] * 60
    result["megabytes_a_minute_of_cpu"] = megabytes / result["cpu_s"] * 60
    numbers = {
        "megabytes": megabytes,
        "workers": flags.workers,
        "cores": cores(),
        "load": os.getloadavg()[0],
    }
    show(result | numbers, flags.json_file)
