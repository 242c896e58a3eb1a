"""Golden traffic: the collectives of compiled steps, by model, layout, kind and mesh axes.

Writes tests/golden/traffic.txt where a change of traffic is meant:

    python -m tests.trainer.planning.traffic
"""

from collections import Counter
from collections.abc import Iterator

import jax

from tests.toys import ROOT
from tests.trainer.planning.runs import LAYOUTS, RUNS, compiled, suited

FILE = ROOT / "tests" / "golden" / "traffic.txt"
MICROBATCHED = ("data_parallel", "data_and_model_parallel", "fsdp", "sequence_parallel")
WITH_EXPERTS = ("fsdp", "sequence_parallel", "two_dimensional")
WITH_ENCODER = ("fsdp", "sequence_parallel", "two_dimensional", "context_parallel")
# One device sends nothing, rules for experts change nothing where there are none, rules without
# experts send for attention what they send in a dense model, and stages send the same whatever
# their layers compute.
CASES = [
    (kind, name)
    for kind in RUNS
    for name in LAYOUTS
    if name != "whole"
    and (kind == "experts" or suited(name) != "experts")
    and (kind != "experts" or suited(name) == "experts" or name in WITH_EXPERTS)
    and (kind != "encoder-decoder" or name in WITH_ENCODER)
    and (kind == "dense" or name != "pipeline")
    and (kind != "microbatches" or name in MICROBATCHED)
]


def jax_version() -> str:
    """Returns the version with which the compiler may choose other collectives."""
    return "jax " + ".".join(jax.__version__.split(".")[:2])


def traffic(kind: str, name: str) -> Iterator[str]:
    """Yields a line for each kind of collective of a training step under a layout."""
    counts, sizes = Counter[str](), Counter[str]()
    for collective in compiled(kind, name).work.collectives:
        what = f"{collective.kind} over {','.join(collective.mesh_axes)}"
        counts[what] += collective.times
        sizes[what] += collective.times * collective.bytes
    for what in sorted(counts):
        yield f"{kind} {name}: {counts[what]:,} {what}, {sizes[what]:,} bytes"


def golden() -> tuple[str, list[str]]:
    """Returns the version that the lines were made with, and the lines."""
    version, *lines = FILE.read_text().splitlines()
    return version, lines


def write() -> None:
    lines = [line for case in CASES for line in traffic(*case)]
    FILE.write_text("\n".join([jax_version(), *lines]) + "\n")


if __name__ == "__main__":
    import tests.conftest  # noqa: F401

    write()
