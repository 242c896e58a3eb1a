"""Measures the seconds to the first step of a run, with a warm compilation cache.

    meshloom bench start --json=bench.json

Runs `meshloom train` for one step of the quickstart, in a new model directory each time.  The first
run prepares the data and fills the compilation cache, and is reported separately.
"""

import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from scripts.benchmarks.rounds import CHECKOUT, MESHLOOM, Count, JsonFlags, cores, show

GIN_FILE = "configs/runs/quickstart.gin"


def first_step_s(model_dir: Path, data_dir: Path) -> float:
    """Trains one step; returns the seconds until its line is printed."""
    folders = f"--model_dir={model_dir}", f"--data_dir={data_dir}"
    command = [*MESHLOOM, "train", *folders, f"--gin_file={GIN_FILE}", "--gin_param=Run.steps=1"]
    start = time.perf_counter()
    process = subprocess.Popen(
        command, cwd=CHECKOUT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    seconds, lines = None, []
    with process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if line.startswith("step 1/"):
                seconds = time.perf_counter() - start
    if process.returncode or seconds is None:
        sys.exit("".join(["meshloom train failed:\n", *lines]))
    return seconds


@dataclass(frozen=True, kw_only=True)
class Flags(JsonFlags):
    """Measures how long a run of the quickstart takes to its first step."""

    rounds: Count = 3
    """Warm runs to measure."""


def benchmark(flags: Flags) -> None:
    """Runs the quickstart once more than there are rounds, and prints the seconds."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        first_s, *warm_s = (
            first_step_s(folder / str(i), folder / "data") for i in range(flags.rounds + 1)
        )
    warm = {"warm_s": statistics.median(warm_s), "warm_runs_s": warm_s}
    show({"first_s": first_s, **warm, "cores": cores()}, flags.json_file)
