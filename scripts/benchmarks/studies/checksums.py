"""Measures what checksums cost when a checkpoint is restored.

python -m scripts.benchmarks.studies.checksums [ROUNDS]
"""

import statistics
import sys
import tempfile
import time
from pathlib import Path

import jax
import numpy as np
from orbax.checkpoint._src.serialization import tensorstore_utils

from trainer.checkpoints.integrity import checksum_chunks
from trainer.checkpoints.manager import Checkpoints

ARRAYS, SHAPE = 12, (4096, 1024)


def main() -> None:
    """Restores one state, saved without checksums (twice) and with them, in alternating rounds."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 9
    rng = np.random.default_rng(0)
    state = {
        f"w{i}_DF": jax.device_put(rng.normal(size=SHAPE).astype(np.float32), jax.devices()[0])
        for i in range(ARRAYS)
    }
    abstract = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), state
    )
    plain = tensorstore_utils._build_zarr3_metadata
    checksum_chunks()
    checked = tensorstore_utils._build_zarr3_metadata
    builds = {"without": plain, "again without": plain, "with": checked}
    times: dict[str, list[float]] = {name: [] for name in builds}
    with tempfile.TemporaryDirectory() as folder:
        saved = {name: Checkpoints(Path(folder, name)) for name in builds}
        for name, build in builds.items():
            tensorstore_utils._build_zarr3_metadata = build
            saved[name].save(1, state)
            saved[name].wait()
        for _ in range(rounds):
            for name, checkpoints in saved.items():
                start = time.process_time()
                checkpoints.restore(abstract, 1)
                times[name].append(time.process_time() - start)
    for name, seconds in times.items():
        ratio = statistics.median(a / b for a, b in zip(seconds, times["without"], strict=True))
        print(f"{name}: {statistics.median(seconds):.3f} s of the processor, {ratio:.2f}")


if __name__ == "__main__":
    main()
