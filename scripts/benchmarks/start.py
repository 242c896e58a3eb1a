"""Measures the seconds to the first step of a run, with a warm compilation cache.

    meshloom bench start --json=bench.json

Runs `meshloom train` for one step of the quickstart, in a new model directory each time.  The first
run prepares the data and fills the compilation cache, and is reported by itself.
"""

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click

from scripts.benchmarks.options import json_option, rounds_option
from scripts.benchmarks.rounds import CHECKOUT, cores, show

GIN_FILE = "configs/runs/quickstart.gin"


def first_step_s(model_dir: Path, data_dir: Path) -> float:
    """Trains one step; returns the seconds until its line is printed."""
    command = [
        sys.executable, "-m", "scripts.meshloom", "train",
        f"--model_dir={model_dir}", f"--data_dir={data_dir}", f"--gin_file={GIN_FILE}",
        "--gin_param=Run.steps=1",
    ]  # fmt: skip
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


@click.command()
@rounds_option(3, "Warm runs to measure.")
@json_option()
def main(count: int, json_file: str | None) -> None:
    """Measures how long a run of the quickstart takes to its first step."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        first, *warm = (first_step_s(place / str(i), place / "data") for i in range(count + 1))
    result = {
        "first_s": first,
        "warm_s": statistics.median(warm),
        "warm_runs_s": warm,
        "cores": cores(),
    }
    show(result, json_file)


if __name__ == "__main__":
    main()
