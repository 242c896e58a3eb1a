"""Measures what checksums cost when checkpoints and cached rows are read.

python -m scripts.benchmarks.studies.checksums [ROUNDS]
"""

import functools
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import jax
import numpy as np
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
        compare("restoring", restoring(Path(folder)), rounds)
        compare(f"{ROWS // BATCH} batches of rows", reading_rows(Path(folder)), rounds)


def restoring(folder: Path) -> dict[str, Callable[[], object]]:
    """Returns what restores one state, saved without checksums (twice) and with them."""
    rng = np.random.default_rng(0)
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    state = {
        f"w{i}_DF": jax.device_put(rng.normal(size=SHAPE).astype(np.float32), sharding)
        for i in range(ARRAYS)
    }
    abstract = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), state
    )
    plain = tensorstore_utils._build_zarr3_metadata
    checksum_chunks()
    checked = tensorstore_utils._build_zarr3_metadata
    calls: dict[str, Callable[[], object]] = {}
    for name, build in {"without": plain, "again without": plain, "with": checked}.items():
        tensorstore_utils._build_zarr3_metadata = build
        checkpoints = Checkpoints(folder / name)
        checkpoints.save(1, state)
        checkpoints.wait()
        calls[name] = functools.partial(checkpoints.restore, abstract, 1)
    return calls


def reading_rows(folder: Path) -> dict[str, Callable[[], object]]:
    """Returns what reads rows in random order: unchecked, checked, and verified before."""
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

    return {
        "without": lambda: read_all(np.load(path, mmap_mode="r")),
        "with": lambda: read_all(CheckedArray(path, "")),
        "read again": lambda: read_all(verified),
    }


def compare(what: str, calls: Mapping[str, Callable[[], object]], rounds: int) -> None:
    """Prints the median processor times of calls that alternate, and their ratio to the first."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.process_time()
            call()
            times[name].append(time.process_time() - start)
    for name, measured in times.items():
        pairs = zip(measured, times["without"], strict=True)
        ratio = statistics.median(seconds / without for seconds, without in pairs)
        print(f"{what}, {name}: {statistics.median(measured):.3f} s of the processor, {ratio:.2f}")


if __name__ == "__main__":
    main()
