"""Measures collectives among the devices at hand, and predicts them for slices of TPUs.

    meshloom bench collectives --simulate_devices=8 --output=collectives.png --json=bench.json

Each device holds an array of the given size.  GShard (section 5.3, figure 9) measured the same on
TPU v3: an all-reduce takes as long on any number of cores, an all-to-all 9 times as long on 2,048
as on 16.  The prediction is that of plans (layouts/cost/interconnect.py).
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click
import numpy as np

from scripts.benchmarks.options import count_option, json_option
from scripts.benchmarks.rounds import best_seconds, cores, show
from scripts.command_line import OutputFile

AXIS = "all"
KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
MEGABYTES = (8, 32)  # as in GShard's figure
CHIPS = ("v3", "v5e", "v5p", "v6e", "h100")
FEW, MANY = 16, 2048
OTHER_SLICES = {"v3": ("v3:2x4",)}  # 16 cores, with which GShard's figure begins
PUBLISHED_GROWTH = {"all-reduce": 1.0, "all-to-all": 9.0}  # from few to many, on TPU v3
Seconds = dict[int, float]  # by number of devices


def measured(kind: str, size_bytes: int) -> Seconds:
    """Measures a collective on 2, 4, 8 .. of the devices at hand."""
    import jax

    counts = [2**i for i in range(1, len(jax.devices()).bit_length())]
    return {count: call_seconds(kind, size_bytes, count) for count in counts}


def call_seconds(kind: str, size_bytes: int, count: int) -> float:
    """Measures a collective of so many devices, on each of which an array has so many bytes."""
    import jax

    mesh = jax.make_mesh((count,), (AXIS,), devices=jax.devices()[:count])
    place = jax.NamedSharding(mesh, jax.P(AXIS))
    share = size_bytes // 4 // count  # an all-gather has this of the result; others have it all
    length = share if kind == "all-gather" else share * count
    array = jax.device_put(np.zeros((count * length,), np.float32), place)
    function = jax.jit(
        jax.shard_map(
            collective(kind, count), mesh=mesh, in_specs=jax.P(AXIS), out_specs=jax.P(AXIS)
        )
    )
    return best_seconds(lambda: function(array).block_until_ready())


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


def predicted(kind: str, size_bytes: int, chip: str) -> Seconds:
    """Predicts a collective of all devices of each slice of a chip, or of nodes of GPUs."""
    from layouts.cost.collectives import Collective
    from layouts.cost.interconnect import Slice
    from layouts.cost.slice_shapes import offered_slices
    from layouts.cost.step_time import coordinates, seconds

    times: Seconds = {}
    others = map(Slice.named, OTHER_SLICES.get(chip, ()))
    for slice in sorted((*offered_slices(chip), *others), key=lambda slice: slice.devices):
        if slice.devices in times or not 1 < slice.devices <= MANY:
            continue  # the first of its size is the most compact
        mesh = {AXIS: slice.devices}
        called = Collective(kind, (AXIS,), slice.devices, size_bytes, 1, "")
        times[slice.devices] = seconds(slice, coordinates(slice, mesh, None), mesh, called)
    return times


def growth(times: Mapping[int, float]) -> float | None:
    """Returns how many times as long a collective takes on many devices as on few."""
    few = min((count for count in times if count >= FEW), default=None)
    return None if few is None or MANY not in times else times[MANY] / times[few]


def draw(
    kinds: Mapping[str, tuple[Seconds, Seconds]], chip: str, megabytes: int, pyplot: Any
) -> Any:
    """Draws measured and predicted times over the number of devices."""
    figure, axes = pyplot.subplots(figsize=(9, 5), layout="constrained")
    for number, (kind, (here, slices)) in enumerate(kinds.items()):
        axes.plot([*slices], [*slices.values()], "o-", color=f"C{number}", label=f"{kind}, {chip}")
        if here:
            label = f"{kind}, measured here"
            axes.plot([*here], [*here.values()], "s--", color=f"C{number}", label=label)
    axes.set(yscale="log", xlabel="devices", ylabel=f"s for {megabytes} MB on each device")
    axes.set_xscale("log", base=2)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    return figure


def write_picture(file: str, draw: Callable[[Any], Any]) -> None:
    """Writes a picture as PNG."""
    from configs.paths import path_of
    from data.storage import atomic_write
    from trainer.metrics.plots import png_of

    atomic_write(path_of(file), png_of(draw))


def measure(kinds: Sequence[str], chip: str, megabytes: Sequence[int]) -> dict[str, Any]:
    """Measures and predicts each collective with each size."""
    result: dict[str, Any] = {"chip": chip, "cores": cores(), "megabytes": {}}
    for size in megabytes:
        result["megabytes"][str(size)] = {
            kind: {
                "measured_s": measured(kind, size * 10**6),
                "predicted_s": (times := predicted(kind, size * 10**6, chip)),
                "predicted_growth": growth(times),
                "published_growth": PUBLISHED_GROWTH.get(kind),
            }
            for kind in kinds
        }
    return result


@click.command()
@click.option("--chip", type=click.Choice(CHIPS), default="v3", show_default=True,
              help="Chip of the slices to predict for.")  # fmt: skip
@count_option("--simulate_devices", default=8, help="Devices of this machine, if it has only CPUs.")
@click.option("--output", type=OutputFile(), metavar="FILE", help="Also draws the times, as PNG.")
@json_option()
def main(chip: str, simulate_devices: int, output: str | None, json_file: str | None) -> None:
    """Measures collectives on this machine, and predicts them for slices."""
    if output == "-":
        raise click.UsageError("--output=-: a picture needs a file.  Give its name.")
    import jax

    from layouts import mesh

    jax.config.update("jax_num_cpu_devices", simulate_devices)
    mesh.leave_absent_tpus()
    result = measure(KINDS, chip, MEGABYTES)
    show(result, json_file)
    if output is not None:
        largest = result["megabytes"][str(MEGABYTES[-1])]
        times = {kind: (row["measured_s"], row["predicted_s"]) for kind, row in largest.items()}
        write_picture(output, functools.partial(draw, times, chip, MEGABYTES[-1]))


if __name__ == "__main__":
    main()
