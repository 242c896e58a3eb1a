"""Measures collectives among the devices of this machine, and predicts them for TPU slices.

    meshloom bench collectives --simulate_devices=8 --json=bench.json
    meshloom bench collectives --predict_only --topology=v3:16x16 --topology=v3:32x32

Each device holds an array of the given size.  GShard (section 5.3, figure 9) measured the same on
TPU v3: `meshloom papers --table=gshard_figure_9` compares.  The prediction is that of plans
(layouts/cost/interconnect.py).
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np

from configs.errors import UserError
from scripts.benchmarks.rounds import JsonFlags, best_seconds, cores
from scripts.flag import Flag

if TYPE_CHECKING:
    from layouts.cost.interconnect import Topology

AXIS = "all"
KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
Chip = Literal["v2", "v3", "v4", "v5e", "v5p", "v6e", "tpu7x", "h100", "h200", "b200"]
OTHER_SLICES = {"v3": ("v3:2x4",)}  # 16 cores, with which GShard's figure begins
MAX_DEVICES = 4096  # of the slices of a chip
MEGABYTE = 10**6

Row = Mapping[str, Any]
"""A collective, megabytes on each device, devices, seconds, and bytes that a device receives a
second; for a prediction the topology, for a measurement the kinds in the compiled program."""


def measure_call(kind: str, megabytes: int, count: int) -> Row:
    """Measures a collective of `count` devices, with an array of this size on each."""
    import jax

    from layouts.hlo.program import CompiledText

    devices = np.array(jax.devices()[:count])
    coords = [getattr(device, "coords", (i,)) for i, device in enumerate(devices)]
    mesh = jax.sharding.Mesh(devices[neighbours(np.array(coords))], (AXIS,))
    sharding = jax.NamedSharding(mesh, jax.P(AXIS))
    size_bytes = megabytes * MEGABYTE
    share = size_bytes // 4 // count  # an all-gather has this of the result; others have it all
    length = share if kind == "all-gather" else share * count
    array = jax.device_put(np.zeros((count * length,), np.float32), sharding)
    function = jax.shard_map(
        collective(kind, count), mesh=mesh, in_specs=jax.P(AXIS), out_specs=jax.P(AXIS)
    )
    executable = jax.jit(function).lower(array).compile()
    compiled = CompiledText.read(executable.as_text() or "").collectives({AXIS: count})
    seconds = best_seconds(lambda: executable(array).block_until_ready())
    kinds = tuple(sorted({one.kind for one in compiled}))
    return row_of(kind, megabytes, count, seconds, compiled=kinds)


def row_of(kind: str, megabytes: int, devices: int, seconds: float, **more: object) -> Row:
    """Returns the row of a collective that takes this long, with its rate."""
    from layouts.cost.collectives import Collective

    received = Collective(kind, (AXIS,), devices, megabytes * MEGABYTE, 1, "").received_bytes
    rate = received / seconds
    sizes = {"kind": kind, "megabytes": megabytes, "devices": devices, "seconds": seconds}
    return {**sizes, "received_bytes_per_s": rate, **more}


def collective(kind: str, count: int) -> Callable[[Any], Any]:
    """Returns a collective of a device's array with those of the others."""
    import jax

    ring = [(i, (i + 1) % count) for i in range(count)]
    return {
        "all-reduce": lambda x: jax.lax.pcast(jax.lax.psum(x, AXIS), AXIS, to="varying"),
        "all-gather": lambda x: jax.lax.all_gather(x, AXIS, tiled=True),
        "reduce-scatter": lambda x: jax.lax.psum_scatter(x, AXIS, tiled=True),
        "all-to-all": lambda x: jax.lax.all_to_all(x, AXIS, 0, 0, tiled=True),
        "collective-permute": lambda x: jax.lax.ppermute(x, AXIS, ring),
    }[kind]


def neighbours(coords: np.ndarray) -> np.ndarray:
    """Orders devices on a torus so that each is next to the one before.

    A permutation sends along this order: with pairs that are close, its cost is constant (GShard,
    section 5.3).

    >>> neighbours(np.array([[0, 0], [0, 1], [1, 0], [1, 1], [2, 0], [2, 1]])).tolist()
    [0, 2, 4, 5, 3, 1]
    """
    keys, turns = [], np.zeros(len(coords), int)
    for axis in coords.T[::-1]:
        keys.append(np.where(turns % 2, -axis, axis))
        turns = turns + axis
    return np.lexsort(keys[::-1])


def slices_of(chip: str) -> list["Topology"]:
    """Returns a slice of each power of two of devices, the most compact."""
    from layouts.cost.interconnect import Topology, offered_slices

    others = map(Topology.named, OTHER_SLICES.get(chip, ()))
    slices: dict[int, Topology] = {}
    for topology in (*offered_slices(chip), *others):  # the first of a size is the most compact
        if 1 < topology.devices <= MAX_DEVICES and math.log2(topology.devices).is_integer():
            slices.setdefault(topology.devices, topology)
    return [slices[devices] for devices in sorted(slices)]


def predict(topology: "Topology", sizes: Sequence[int]) -> Iterator[Row]:
    """Predicts each collective of all devices of a slice, with each size."""
    from layouts.cost.collectives import Collective
    from layouts.cost.step_time import coordinates, seconds

    count, mesh = topology.devices, {AXIS: topology.devices}
    coords = coordinates(topology, mesh, None, f"{AXIS}:-1")
    coords = coords[neighbours(coords)]
    for megabytes in sizes:
        for kind in KINDS:
            call = Collective(kind, (AXIS,), count, megabytes * MEGABYTE, 1, "")
            time_s = seconds(topology, coords, mesh, call)
            yield row_of(kind, megabytes, count, time_s, topology=topology.name)


def print_tables(result: Row) -> None:
    """Prints the measured times and the predicted ones."""
    from scripts.terminal import print_table

    lines: dict[tuple[Any, ...], list[str]] = {}  # each time in the column of its kind
    for row in result["predicted"]:
        key = (row["topology"], row["devices"], row["megabytes"])
        lines.setdefault(key, []).append(milliseconds(row["seconds"]))
    measured = [
        [row["kind"], row["megabytes"], row["devices"], milliseconds(row["seconds"]),
         ", ".join(row["compiled"])]
        for row in result["measured"]
    ]  # fmt: skip
    tables = (
        (["measured here", "MB a device", "devices", "ms", "compiled to"], measured),
        (
            ["predicted for", "devices", "MB a device", *(f"{kind}, ms" for kind in KINDS)],
            [[*key, *times] for key, times in lines.items()],
        ),
    )
    for head, rows in tables:
        if rows:
            print_table(head, rows)


def milliseconds(seconds: float) -> str:
    """Formats a time.

    >>> milliseconds(0.0001234), milliseconds(1.5)
    ('0.123', '1500')
    """
    return f"{1e3 * seconds:.3f}" if seconds < 1 else f"{1e3 * seconds:.0f}"


@dataclass(frozen=True, kw_only=True)
class Flags(JsonFlags):
    """Measures collectives on this machine, and predicts them for slices."""

    chip: Chip = "v3"
    """Predicts for slices of this chip, from few devices to many."""
    topologies: Annotated[tuple[str, ...], Flag(name="topology", metavar="KIND:SIZES")] = ()
    """Predicts for this slice instead, such as v3:32x32; repeat it."""
    megabytes: tuple[int, ...] = (8, 32)
    """Sizes of the array on each device, separated by commas."""
    simulate_devices: Annotated[int, Flag(min=1)] = 8
    """Devices of this machine, if it has only CPUs."""
    predict_only: bool = False
    """Measures nothing on this machine."""


def benchmark(flags: Flags) -> None:
    """Measures and predicts."""
    import jax

    from layouts import absent_devices
    from scripts.commands.common import write_json
    from scripts.commands.planning.inputs import parse_topology
    from scripts.terminal import print_note

    named = [topology for name in flags.topologies if (topology := parse_topology(name))]
    for topology in named:
        if topology.devices == 1:
            raise UserError(
                f"--topology={topology.name}: one device runs no collectives.  "
                "Name a slice of several devices."
            )
    sizes = list(dict.fromkeys(flags.megabytes))
    chosen = {topology.name: topology for topology in named or slices_of(flags.chip)}.values()
    slices = [row for topology in chosen for row in predict(topology, sizes)]
    device, here = None, list[Row]()
    if not flags.predict_only:
        jax.config.update("jax_num_cpu_devices", flags.simulate_devices)
        absent_devices.leave_absent_devices()
        devices = len(jax.devices())
        counts = sorted({*(2**i for i in range(1, devices.bit_length())), devices} - {1})
        here = [measure_call(*call) for call in itertools.product(KINDS, sizes, counts)]
        device = f"{devices} x {jax.devices()[0].device_kind}"
        if not here:
            print_note(f"{device}: one device runs no collectives, so none is measured.")
    result = {
        "device": device,
        "cores": cores(),
        "measured": here,
        "predicted": slices,
    }
    print_tables(result)
    write_json(flags.json_file, result)
