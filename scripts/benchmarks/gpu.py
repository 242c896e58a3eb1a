"""Measures training and decoding on a GPU, in about 8 minutes.

    make bench-gpu

Compares losses, gradients and texts with those of a CPU (tests/test_accelerator.py).  Trains the
1.3B model in bfloat16 at 2,048 and at 8,192 tokens, compared with PyTorch with torch.compile and
flash attention, and one with experts of equal active size.  Decodes with it at batch 1 and 32.
Each part runs in processes of its own and writes its JSON as soon as it ends, so a part that fails
ends only itself; the exit code is then 1.
"""

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from configs.errors import UserError
from scripts.benchmarks.rounds import CHECKOUT, MESHLOOM
from scripts.flag import Flag

TESTS = "tests"
SHARES = {"share_of_bandwidth", "share_of_matrix_rate"}
LONG = "--rounds=3 --steps=5 --one_at_a_time"
MEMORY = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92"}
"""What JAX takes of the GPU; 0.75, its default, is too little for 1.3B weights and their batch."""
PARTS = {  # the goal for the share of the measured rate, the benchmark and its flags
    "train_1.3b": (0.60, f"train --shape=1.3b --systems=meshloom,torch_compiled {LONG}"),
    "train_1.3b_8k": (0.60, f"train --shape=1.3b_8k --systems=meshloom,torch_compiled {LONG}"),
    "train_1.3b_experts": (0.45, f"train --shape=1.3b_experts --systems=meshloom {LONG}"),
    "generate_1.3b": (0.60, "generate --shape=1.3b --batch_sizes=1,32"),
}


def run(name: str, folder: Path) -> bool:
    """Runs one part; returns whether it ended well."""
    environment = {**MEMORY, **os.environ}
    if name == TESTS:  # losses, gradients and texts on the GPU, compared with those of the CPU
        command = [sys.executable, "-m", "pytest", "-n", "0", "tests/test_accelerator.py"]
        environment = {**environment, "MESHLOOM_TEST_PLATFORMS": "cuda,cpu"}
        environment["XLA_FLAGS"] = "--xla_gpu_autotune_level=0"  # most of the time of a test
        return subprocess.run(command, cwd=CHECKOUT, env=environment).returncode == 0
    goal, line = PARTS[name]
    file = folder / f"{name}.json"
    command = [*MESHLOOM, "bench", *line.split(), f"--json={file}"]
    start = time.perf_counter()
    process = subprocess.run(
        command, cwd=CHECKOUT, env=environment, stdout=subprocess.PIPE, text=True
    )
    seconds = time.perf_counter() - start
    if process.returncode:
        print(f"{name}: failed with exit code {process.returncode} after {seconds:.0f} s")
        return False
    shares = ", ".join(f"{key} {share:.3f}" for key, share in shares_of(file).items())
    print(f"{name}: {shares} (goal {goal}), {seconds:.0f} s, {file}")
    return True


def shares_of(file: Path) -> dict[str, float]:
    """Reads the share of the device's measured rate of each system, or of each batch size."""
    result = json.loads(file.read_text())
    return {
        system: measured[name]
        for system, measured in result.get("batch_sizes", result).items()
        if isinstance(measured, dict)
        for name in SHARES & measured.keys()
    }


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Measures training and decoding on one GPU, and PyTorch where it is installed."""

    folder: Path = Path("bench_gpu")
    """Where the JSON of each part goes."""
    parts: Annotated[tuple[str, ...], Flag(choices=(TESTS, *PARTS))] = (TESTS, *PARTS)
    """Parts to run, in this order, separated by commas."""


def benchmark(flags: Flags) -> None:
    """Runs the parts; the exit code is 1 if one fails."""
    # In a separate process: one that has asked for the GPU keeps it.
    code = "import jax; print(jax.default_backend())"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    platform = answer.stdout.strip()
    if platform != "gpu":
        raise UserError(
            f"no GPU: JAX computes on {platform or 'nothing'}.  Where there is one, install "
            "JAX for it: make cuda."
        )
    flags.folder.mkdir(parents=True, exist_ok=True)
    if not all([run(name, flags.folder) for name in flags.parts]):
        sys.exit(1)
