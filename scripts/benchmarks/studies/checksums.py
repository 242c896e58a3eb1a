"""Measures what checksums cost when checkpoints and cached rows are read.

python -m scripts.benchmarks.studies.checksums [ROUNDS]
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding
from orbax.checkpoint._src.serialization import tensorstore_utils

from data.packing.rows import read_rows
from data.storage.arrays import CheckedArray, GrowingArray
from trainer.checkpoints.integrity import checksum_chunks
from trainer.checkpoints.manager import Checkpoints

ARRAYS, SHAPE = 12, (4096, 1024)
ROWS, LENGTH, BATCH = 120_000, 256, 64


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 9
    with tempfile.TemporaryDirectory() as folder:
        restoring(Path(folder), rounds)
        reading_rows(Path(folder), rounds)


def restoring(folder: Path, rounds: int) -> None:
    """Restores one state, saved without checksums (twice) and with them."""
    rng = np.random.default_rng(0)
    place = SingleDeviceSharding(jax.devices()[0])
    state = {
        f"w{i}_DF": jax.device_put(rng.normal(size=SHAPE).astype(np.float32), place)
        for i in range(ARRAYS)
    }
    abstract = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), state
    )
    build = tensorstore_utils._build_zarr3_metadata
    checksum_chunks()
    builds = {"without": build, "again without": build,
              "with": tensorstore_utils._build_zarr3_metadata}  # fmt: skip
    calls = {}
    for name, build in builds.items():
        tensorstore_utils._build_zarr3_metadata = build
        checkpoints = Checkpoints(folder / name)
        checkpoints.save(1, state)
        checkpoints.wait()
        calls[name] = lambda checkpoints=checkpoints: checkpoints.restore(abstract, 1)
    compare("restoring", calls, rounds)


def reading_rows(folder: Path, rounds: int) -> None:
    """Reads rows in random order, without checksums, with them, and once they are verified."""
    rng = np.random.default_rng(0)
    path = folder / "rows.npy"
    with GrowingArray(path, LENGTH, np.uint16) as array:
        array.append(rng.integers(0, 32_000, (ROWS, LENGTH), np.uint16))
    batches = rng.permutation(ROWS - ROWS % BATCH).reshape(-1, BATCH)
    verified = CheckedArray(path, "")
    verified.verify_all()

    def read_all(rows: CheckedArray | np.ndarray) -> None:
        for row_ids in batches:
            read_rows(row_ids, rows)

    calls = {
        "without": lambda: read_all(np.load(path, mmap_mode="r")),
        "with": lambda: read_all(CheckedArray(path, "")),
        "read again": lambda: read_all(verified),
    }
    compare(f"{len(batches)} batches of rows", calls, rounds)


def compare(what: str, calls: Mapping[str, Callable[[], object]], rounds: int) -> None:
    """Prints the median times of calls that alternate, and their ratio to the first."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            start, processor_start = time.perf_counter(), time.process_time()
            call()
            spent = time.perf_counter() - start, time.process_time() - processor_start
            times[name].append(spent)
    first = next(iter(times.values()))
    for name, measured in times.items():
        for kind, label in enumerate(("elapsed", "processor")):
            median = statistics.median(pair[kind] for pair in measured)
            ratio = statistics.median(
                pair[kind] / before[kind] for pair, before in zip(measured, first, strict=True)
            )
            print(f"{what}, {name}: {median:.3f} s {label}, {ratio:.2f} of the same round")


if __name__ == "__main__":
    main()
