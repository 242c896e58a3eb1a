"""Lists the slices of TPUs that Google Cloud offers, and nodes of GPUs."""

import functools
import itertools
import math

from configs.errors import UserError
from layouts.cost.hardware import GPUS, GPUS_OF_A_NODE
from layouts.cost.interconnect import Topology

# docs.cloud.google.com/tpu/docs/ v2, v3, v4, v5e, v5p and v6e, and, for 4x8 and 8x16 of v3,
# docs.cloud.google.com/kubernetes-engine/docs/concepts/plan-tpus.  Read on 23 November 2026.
OF_256_CHIPS = "1x1 2x2 2x4 4x4 4x8 8x8 8x16 16x16"
WITHIN_A_CUBE = "2x2x1 2x2x2 2x2x4 2x4x4"
SHAPES = {
    "v2": "2x2 4x4 8x8 8x16 16x16",
    "v3": "2x2 4x4 4x8 8x8 8x16 16x16 16x32 32x32",
    "v4": WITHIN_A_CUBE,
    "v5e": OF_256_CHIPS,
    "v5p": WITHIN_A_CUBE,
    "v6e": OF_256_CHIPS,
}
# Larger slices of these consist of whole cubes, AxBxC with A <= B <= C.
CUBE_SIDE = 4
MAX_CHIPS_OF_CUBES = {"v4": 4096, "v5p": 6144}
# Not offered: the eight chips on which the Giant Models guide serves its 64B (section 3.2).
PUBLISHED = {"v3:4x2"}
MAX_NEARBY = 4  # in a message
LARGEST_NODES = 2048  # of GPUs, that a plan suggests


@functools.cache
def offered_slices(kind: str) -> tuple[Topology, ...]:
    """Returns all slices of a kind, the fewest chips first, of equal ones the most compact.

    >>> [topology.name for topology in offered_slices("v2")]
    ['v2:2x2', 'v2:4x4', 'v2:8x8', 'v2:8x16', 'v2:16x16']
    """
    if kind in GPUS:
        shapes = shapes_of_nodes(LARGEST_NODES)
    else:
        shapes = [*SHAPES[kind].split(), *shapes_of_cubes(MAX_CHIPS_OF_CUBES.get(kind, 0))]
    slices = (Topology.named(f"{kind}:{shape}") for shape in shapes)
    return tuple(sorted(slices, key=lambda topology: (topology.chips, max(topology.extents))))


def shapes_of_cubes(max_chips: int) -> list[str]:
    """Returns the shapes of whole cubes, up to a number of chips.

    >>> shapes_of_cubes(256)
    ['4x4x4', '4x4x8', '4x4x12', '4x4x16', '4x8x8']
    """
    sides = range(CUBE_SIDE, max_chips // CUBE_SIDE**2 + 1, CUBE_SIDE)
    boxes = itertools.combinations_with_replacement(sides, 3)
    return ["x".join(map(str, box)) for box in boxes if math.prod(box) <= max_chips]


def shapes_of_nodes(max_nodes: int) -> list[str]:
    """Returns the sizes of one node of GPUs, then powers of two of full nodes.

    >>> shapes_of_nodes(4)
    ['1x1', '1x2', '1x4', '1x8', '2x8', '4x8']
    """
    full, doublings = GPUS_OF_A_NODE[-1], range(1, max_nodes.bit_length())
    return [*(f"1x{n}" for n in GPUS_OF_A_NODE), *(f"{2**i}x{full}" for i in doublings)]


def check_offered(topology: Topology) -> None:
    """Raises an error that lists slices of similar size if Google Cloud does not offer this one."""
    offered, box = offered_slices(topology.kind), topology.box
    if box in offered or box.name in PUBLISHED:
        return
    nearest = sorted(offered, key=lambda other: abs(math.log(other.chips / box.chips)))
    nearby = [other.name for other in offered if other in nearest[:MAX_NEARBY]]
    raise UserError(
        f"--topology={topology.name}: Google Cloud offers no such slice.  "
        f"Legal nearby: {', '.join(nearby)}."
    )
