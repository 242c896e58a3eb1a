"""Measures preparing text and reading batches, compared with what a training step needs.

    meshloom bench input --json=bench.json

Prepares the language model of the docstrings in a new folder, and reads the batches of its run in
the order of training, as the loop does, but without a step between them.
"""

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.benchmarks.options import Count, JsonFlags
from scripts.benchmarks.rounds import cores, show
from scripts.command_line import run_command

GIN_FILE = "configs/runs/quickstart.gin"


def measure(batches: int) -> dict[str, Any]:
    """Returns the megabytes prepared a minute and the tokens read a second."""
    import data.cache
    from data.order import batches as read_batches
    from scripts.commands.common import settings
    from trainer.run import Run

    run = settings(None, (GIN_FILE,), ()).make(Run)
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        prepared = data.cache.prepare(run.task, Path(folder))
        prepare_s = time.perf_counter() - start
        rows = prepared.splits["train"]
        reader = read_batches(rows, run.seed, run.batch_sequences, 0)
        next(reader)
        start = time.perf_counter()
        for _ in range(batches):
            next(reader)
        read_s = time.perf_counter() - start
    text_bytes = sum(split.counts.bytes for split in prepared.splits.values())
    tokens = batches * run.batch_sequences * rows.length
    return {
        "prepare_s": prepare_s,
        "prepared_megabytes_a_minute": text_bytes / 1e6 / prepare_s * 60,
        "batch_s": read_s / batches,
        "read_tokens_per_s": tokens / read_s,
        "batches": batches,
        "cores": cores(),
    }


@dataclass(frozen=True, kw_only=True)
class Flags(JsonFlags):
    """Measures how fast text is prepared, and batches are read."""

    batches: Count = 500
    """Batches to read."""


def benchmark(flags: Flags) -> None:
    """Prints both speeds."""
    show(measure(flags.batches), flags.json_file)


if __name__ == "__main__":
    run_command(Flags, benchmark)
