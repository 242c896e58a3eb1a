"""Measures collectives among the devices at hand, and predicts them for slices of TPUs.

    meshloom bench collectives --simulate_devices=8 --figure=collectives.png --json=bench.json
    meshloom bench collectives --predict_only --topology=v3:16x16 --topology=v3:32x32

Each device holds an array of the given size.  GShard (section 5.3, figure 9) measured the same on
TPU v3: an all-reduce takes as long on any number of cores, an all-to-all 9 times as long on 2,048
as on 16.  The prediction is that of plans (layouts/cost/interconnect.py).
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import click
import numpy as np

from scripts.benchmarks.options import count_option, json_option, sizes_option
from scripts.benchmarks.rounds import best_seconds, cores
from scripts.command_line import OutputFile

if TYPE_CHECKING:
    from layouts.cost.interconnect import Topology

AXIS = "all"
KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
CHIPS = ("v2", "v3", "v4", "v5e", "v5p", "v6e", "h100", "h200", "b200")
OTHER_SLICES = {"v3": ("v3:2x4",)}  # 16 cores, with which GShard's figure begins
MAX_DEVICES = 4096  # of the slices of a chip
MEGABYTE = 10**6


class MeasuredTime(NamedTuple):
    """Holds the time of a collective among devices of this machine."""

    kind: str
    megabytes: int  # on each device
    devices: int
    seconds: float
    received_bytes_per_s: float  # by each device
    compiled: tuple[str, ...]  # kinds of collectives in the program that was measured


class PredictedTime(NamedTuple):
    """Holds the predicted time of a collective among all devices of a slice."""

    kind: str
    megabytes: int
    devices: int
    seconds: float
    received_bytes_per_s: float
    topology: str


class Growth(NamedTuple):
    """Holds how many times as long a collective takes on more devices."""

    kind: str
    from_devices: int
    to_devices: int
    published: float
    source: str


CHIP_OF_GROWTHS = "v3"
GROWTHS = (
    Growth("all-reduce", 16, 2048, 1.0, "GShard, section 5.3"),
    Growth("all-to-all", 16, 2048, 9.0, "GShard, section 5.3"),
    Growth("all-to-all", 128, 2048, 3.75, "GShard, section 5.2"),
)


def measured(kind: str, megabytes: int) -> list[MeasuredTime]:
    """Measures a collective on 2, 4, 8 .. and all of the devices at hand."""
    import jax

    devices = len(jax.devices())
    counts = sorted({*(2**i for i in range(1, devices.bit_length())), devices} - {1})
    return [measure_call(kind, megabytes, count) for count in counts]


def measure_call(kind: str, megabytes: int, count: int) -> MeasuredTime:
    """Measures a collective of so many devices, on each of which an array has so many bytes."""
    import jax

    from layouts.cost.collectives import Collective
    from layouts.hlo.program import CompiledProgram

    devices = np.array(jax.devices()[:count])
    places = [getattr(device, "coords", (i,)) for i, device in enumerate(devices)]
    mesh = jax.sharding.Mesh(devices[neighbours(np.array(places))], (AXIS,))
    place = jax.NamedSharding(mesh, jax.P(AXIS))
    size_bytes = megabytes * MEGABYTE
    share = size_bytes // 4 // count  # an all-gather has this of the result; others have it all
    length = share if kind == "all-gather" else share * count
    array = jax.device_put(np.zeros((count * length,), np.float32), place)
    function = jax.shard_map(
        collective(kind, count), mesh=mesh, in_specs=jax.P(AXIS), out_specs=jax.P(AXIS)
    )
    program = jax.jit(function).lower(array).compile()
    compiled = CompiledProgram.read(program.as_text() or "").collectives({AXIS: count})
    seconds = best_seconds(lambda: program(array).block_until_ready())
    received = Collective(kind, (AXIS,), count, size_bytes, 1, "").received_bytes
    kinds = tuple(sorted({one.kind for one in compiled}))
    return MeasuredTime(kind, megabytes, count, seconds, received / seconds, kinds)


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


def neighbours(places: np.ndarray) -> np.ndarray:
    """Numbers the places of devices on a torus so that each is next to the one before.

    A permutation sends along this order: with pairs that are close, its cost is constant (GShard,
    section 5.3).

    >>> neighbours(np.array([[0, 0], [0, 1], [1, 0], [1, 1], [2, 0], [2, 1]])).tolist()
    [0, 2, 4, 5, 3, 1]
    """
    keys, turns = [], np.zeros(len(places), int)
    for place in places.T[::-1]:
        keys.append(np.where(turns % 2, -place, place))
        turns = turns + place
    return np.lexsort(keys[::-1])


def slices_of(chip: str) -> list["Topology"]:
    """Returns a slice of each power of two of devices, the most compact."""
    from layouts.cost.interconnect import Topology
    from layouts.cost.slice_shapes import offered_slices

    others = map(Topology.named, OTHER_SLICES.get(chip, ()))
    slices: dict[int, Topology] = {}
    for topology in (*offered_slices(chip), *others):  # the first of a size is the most compact
        if 1 < topology.devices <= MAX_DEVICES and math.log2(topology.devices).is_integer():
            slices.setdefault(topology.devices, topology)
    return [slices[devices] for devices in sorted(slices)]


def predicted(topology: "Topology", sizes: Sequence[int]) -> Iterator[PredictedTime]:
    """Predicts each collective of all devices of a slice, with each size."""
    from layouts.cost.collectives import Collective
    from layouts.cost.step_time import coordinates, seconds

    mesh = {AXIS: topology.devices}
    places = coordinates(topology, mesh, None, f"{AXIS}:-1")
    places = places[neighbours(places)]
    for megabytes in sizes:
        for kind in KINDS:
            call = Collective(kind, (AXIS,), topology.devices, megabytes * MEGABYTE, 1, "")
            time_s = seconds(topology, places, mesh, call)
            rate = call.received_bytes / time_s
            yield PredictedTime(kind, megabytes, topology.devices, time_s, rate, topology.name)


def growths(slices: Sequence[PredictedTime]) -> list[dict[str, Any]]:
    """Compares the published growths with those among the predictions, of whatever size."""
    times = {
        (one.kind, one.devices): one.seconds
        for one in slices
        if one.topology.startswith(f"{CHIP_OF_GROWTHS}:")
    }
    rows = []
    for growth in GROWTHS:
        ends = (growth.kind, growth.from_devices), (growth.kind, growth.to_devices)
        if all(end in times for end in ends):
            rows.append(growth._asdict() | {"predicted": times[ends[1]] / times[ends[0]]})
    return rows


def print_measured(rows: Sequence[MeasuredTime]) -> None:
    """Prints the measured times, a line for each collective and size."""
    from scripts.terminal import print_table

    counts = sorted({row.devices for row in rows})
    lines: dict[tuple[str, int], list[MeasuredTime]] = {}
    for row in rows:
        lines.setdefault((row.kind, row.megabytes), []).append(row)
    print_table(
        ["measured here", "MB a device", *(f"ms on {n}" for n in counts), "compiled to"],
        [
            [
                kind,
                size,
                *(milliseconds(row.seconds) for row in times),
                ", ".join(times[0].compiled),
            ]
            for (kind, size), times in lines.items()
        ],
    )


def print_predicted(rows: Sequence[PredictedTime]) -> None:
    """Prints the predicted times in milliseconds, a line for each slice and size."""
    from scripts.terminal import print_table

    lines: dict[tuple[str, int, int], list[str]] = {}
    for row in rows:
        line = lines.setdefault((row.topology, row.devices, row.megabytes), [])
        line.append(milliseconds(row.seconds))
    print_table(
        ["predicted for", "devices", "MB a device", *(f"{kind}, ms" for kind in KINDS)],
        [[*topology, *times] for topology, times in lines.items()],
    )


def print_growths(rows: Sequence[dict[str, Any]]) -> None:
    """Prints how the times of collectives grow with the devices, compared with the paper."""
    from scripts.terminal import print_table

    print_table(
        ["times as long", "devices", "predicted", "published", "in"],
        [
            [row["kind"], f"{row['from_devices']:,} to {row['to_devices']:,}",
             f"{row['predicted']:.2f}", f"{row['published']:g}", row["source"]]
            for row in rows
        ],
    )  # fmt: skip


def milliseconds(seconds: float) -> str:
    """Formats a time.

    >>> milliseconds(0.0001234), milliseconds(1.5)
    ('0.123', '1500')
    """
    return f"{1e3 * seconds:.3f}" if seconds < 1 else f"{1e3 * seconds:.0f}"


def draw(result: dict[str, Any], pyplot: Any) -> Any:
    """Draws the predicted times over the number of devices, next to the measured ones."""
    parts = [part for part in ("predicted", "measured") if result[part]]
    size = (1 + 5 * len(parts), 5)
    figure, panels = pyplot.subplots(
        1, len(parts), figsize=size, layout="constrained", squeeze=False
    )
    megabytes = max(row["megabytes"] for row in result["predicted"])
    for part, axes in zip(parts, panels[0], strict=True):
        rows = [row for row in result[part] if row["megabytes"] == megabytes]
        for number, (kind, marker) in enumerate(zip(KINDS, "oDx^v", strict=True)):
            ends = [(row["devices"], 1e3 * row["seconds"]) for row in rows if row["kind"] == kind]
            axes.plot(
                *zip(*sorted(ends), strict=True), f"{marker}-", color=f"C{number}", label=kind
            )
        axes.set(yscale="log", xlabel="devices", ylabel=f"ms for {megabytes} MB on each device")
        axes.set_xscale("log", base=2)
        counts = sorted({row["devices"] for row in rows})
        axes.set_xticks(counts, [f"{count:,}" for count in counts], fontsize="small")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.grid(alpha=0.3)
    chips = sorted({row["topology"].partition(":")[0] for row in result["predicted"]})
    panels[0, 0].set_title(f"predicted for slices of {', '.join(chips)}")
    draw_growths(result, megabytes, panels[0, 0])
    for axes in panels[0]:
        label_minor_ticks(axes)
    if result["measured"]:
        panels[0, 1].set_title(
            f"measured on {result['device']}, {result['cores']} cores of the host"
        )
    figure.legend(
        *panels[0, 0].get_legend_handles_labels(),
        loc="outside lower center",
        ncols=1 + len(parts),  # as many as fit
        fontsize="small",
    )
    return figure


def label_minor_ticks(axes: Any) -> None:
    """Labels times between the powers of ten, of which few are in the figure."""
    from matplotlib.ticker import LogLocator

    low, high = axes.get_ylim()
    axes.yaxis.set_minor_locator(LogLocator(subs=range(2, 10) if high < 10 * low else (2, 5)))
    axes.yaxis.set_minor_formatter("{x:g}")


def draw_growths(result: dict[str, Any], megabytes: int, axes: Any) -> None:
    """Draws the published growths, from the predicted time on the fewer devices."""
    times = {
        (row["kind"], row["devices"]): 1e3 * row["seconds"]
        for row in result["predicted"]
        if row["megabytes"] == megabytes
    }
    for row in result["growths"]:
        start = times[row["kind"], row["from_devices"]]
        axes.plot(
            [row["from_devices"], row["to_devices"]],
            [start, start * row["published"]],
            "*:",
            color=f"C{KINDS.index(row['kind'])}",
            markersize=11,
            label=f"{row['kind']}, x {row['published']:g} ({row['source']})",
        )


class PngFile(OutputFile):
    """Checks the name of a picture to write."""

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Returns the name, where it is that of a PNG file."""
        if not value.endswith(".png"):
            self.fail(f"{value}: not a picture format.  Legal ending: .png.", param, ctx)
        return super().convert(value, param, ctx)


def write_figure(file: str, result: dict[str, Any]) -> None:
    """Writes the figure as PNG."""
    from configs.paths import path_of
    from data.storage.files import atomic_write
    from trainer.metrics.plots import png_of

    atomic_write(path_of(file), png_of(lambda pyplot: draw(result, pyplot)))


def measure_here(sizes: Sequence[int], simulate_devices: int) -> tuple[str, list[MeasuredTime]]:
    """Measures each collective with each size; returns what the devices are as well."""
    import jax

    from layouts import mesh

    jax.config.update("jax_num_cpu_devices", simulate_devices)
    mesh.leave_absent_tpus()
    device = f"{len(jax.devices())} x {jax.devices()[0].device_kind}"
    return device, [row for kind in KINDS for size in sizes for row in measured(kind, size)]


@click.command()
@click.option("--chip", type=click.Choice(CHIPS), default="v3", show_default=True,
              help="Predicts for slices of this chip, from few devices to many.")  # fmt: skip
@click.option("--topology", "topologies", multiple=True, metavar="KIND:SIZES",
              help="Predicts for this slice instead, such as v3:32x32; repeat it.")  # fmt: skip
@sizes_option("--megabytes", "8,32", "Sizes of the array on each device, separated by commas.")
@count_option("--simulate_devices", default=8, help="Devices of this machine, if it has only CPUs.")
@click.option("--predict_only", is_flag=True, help="Measures nothing on this machine.")
@click.option("--figure", type=PngFile(), metavar="FILE", help="Also draws the times, as PNG.")
@json_option()
def main(
    chip: str,
    topologies: tuple[str, ...],
    megabytes: list[int],
    simulate_devices: int,
    predict_only: bool,
    figure: str | None,
    json_file: str | None,
) -> None:
    """Measures collectives on this machine, and predicts them for slices."""
    from configs.errors import UserError
    from scripts.commands.common import write_json
    from scripts.commands.planning.inputs import parse_topology
    from scripts.terminal import print_note

    named = [topology for name in topologies if (topology := parse_topology(name)) is not None]
    for topology in named:
        if topology.devices == 1:
            raise UserError(
                f"--topology={topology.name}: one device runs no collectives.  "
                "Name a slice of several devices."
            )
    sizes = list(dict.fromkeys(megabytes))
    chosen = {topology.name: topology for topology in named or slices_of(chip)}.values()
    slices = [row for topology in chosen for row in predicted(topology, sizes)]
    device, here = (None, []) if predict_only else measure_here(sizes, simulate_devices)
    compared = growths(slices)
    if here:
        print_measured(here)
    elif not predict_only:
        print_note(f"{device}: one device runs no collectives, so none is measured.")
    print_predicted(slices)
    if compared:
        print_growths(compared)
    result = {
        "device": device,
        "cores": cores(),
        "measured": [row._asdict() for row in here],
        "predicted": [row._asdict() for row in slices],
        "growths": compared,
    }
    write_json(json_file, result)
    if figure is not None:
        write_figure(figure, result)


if __name__ == "__main__":
    main()
