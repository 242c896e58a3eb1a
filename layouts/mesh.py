"""Makes meshes of devices; sets up virtual devices and the compilation cache.

Mesh axes may span slices, which are groups of devices with a slow network between them.  "data:2"
with a mesh of "data:8,model:4" puts two slices side by side along data, each with 4 x 4 devices.
Traffic along model then never leaves a slice.
"""

import contextlib
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh

from configs.errors import UserError, did_you_mean
from layouts.device_order import check_order, coordinates, device_permutation, torus_of
from layouts.layout import Layout, pairs
from layouts.shards import mesh_axes

SLICES_EXAMPLE = "Legal: slices by mesh axis, as in 'data:2', or 'data:-1' for all."


def simulate_devices(count: int) -> None:
    """Simulates `count` CPU devices on this machine.  Call it before the first use of jax."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", count)


def cache_compilations() -> None:
    """Keeps compiled programs on disk, so that the next run of a command starts faster."""
    folder = os.environ.get("JAX_COMPILATION_CACHE_DIR", "~/.cache/meshloom/compiled")
    jax.config.update("jax_compilation_cache_dir", os.path.expanduser(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 1.0)


@contextlib.contextmanager
def uncached() -> Iterator[None]:
    """Disables the compilation cache, which cannot load programs for absent devices."""
    from jax.experimental.compilation_cache import compilation_cache

    enabled = jax.config.values["jax_enable_compilation_cache"]
    try:
        jax.config.update("jax_enable_compilation_cache", False)
        compilation_cache.reset_cache()
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", enabled)
        compilation_cache.reset_cache()


def numbers_by_axis(text: str, head: str, example: str) -> dict[str, int]:
    """Parses a number for each mesh axis, of which one may be -1; errors begin with `head`."""
    try:
        entries = [(name, int(number)) for name, number in pairs(text)]
    except ValueError:
        raise UserError(f"{head}.  {example}") from None
    numbers = dict(entries)
    if len(numbers) < len(entries):
        raise UserError(f"{head}: a mesh axis is named twice.  Name each once.")
    open_axes = sum(number == -1 for number in numbers.values())
    if open_axes > 1:
        raise UserError(f"{head}: only one number may be -1, found {open_axes}.")
    return numbers


def mesh_sizes(text: str, devices: int | None) -> dict[str, int]:
    """Parses sizes by mesh axis; -1 becomes what the other sizes leave of the devices.

    If `devices` is None, sizes are returned as given, to inspect a layout for another machine.
    """
    head = f"Layout.mesh = {text!r}"
    sizes = numbers_by_axis(text, head, "Legal: sizes by mesh axis, as in 'data:2,model:4'.")
    if not sizes:
        raise UserError(f"{head} names no axis.  Legal: sizes, as in 'data:2,model:4'.")
    if any(size < 1 and size != -1 for size in sizes.values()):
        raise UserError(f"{head}: sizes must be at least 1, or -1 for one of them.")
    if devices is None:
        return sizes
    open_axes = [name for name, size in sizes.items() if size == -1]
    rest = math.prod(size for size in sizes.values() if size != -1)
    if open_axes:
        if devices % rest:
            raise UserError(
                f"{head}: the sizes multiply to {rest}, which does not divide the "
                f"{devices} devices.  Change a size, or run with --simulate_devices={rest}."
            )
        sizes[open_axes[0]] = devices // rest
    elif rest > devices or (rest < devices and jax.process_count() > 1):
        raise UserError(
            f"{head}: needs {rest} devices, found {devices}.  Set one size to -1 to use all "
            f"devices, or add --simulate_devices={rest} to try it on this machine."
        )
    return sizes


def batch_shards(layout: Layout, sizes: Mapping[str, int], *, rows_are_groups: bool = False) -> int:
    """Returns the number that must divide the number of rows in a batch.

    `rows_are_groups` is whether each row is also a group of tokens, as in layers of experts that
    drop no tokens.  Unknown mesh axes are ignored; the lint reports them.
    """
    places = (mesh_axes(layout.place(letter)[0]) for letter in "BG"[: 1 + rows_are_groups])
    return math.lcm(*(math.prod(sizes.get(name, 1) for name in names) for names in places))


def make_mesh(layout: Layout) -> Mesh:
    """Makes the layout's mesh on this run's devices."""
    devices = jax.devices()
    sizes = mesh_sizes(layout.mesh, len(devices))
    devices = devices[: math.prod(sizes.values())]
    return mesh_of_devices(devices, sizes, layout.order, layout.slices)


def mesh_of_devices(
    devices: Sequence[Any], sizes: Mapping[str, int], order: str | None, slices: str | None = None
) -> Mesh:
    """Makes a mesh of these devices, in `order` if they have coordinates, else in JAX's order."""
    array = over_slices(devices, sizes, order, slices)
    return Mesh(array, tuple(sizes), axis_types=(AxisType.Explicit,) * len(sizes))


def over_slices(
    devices: Sequence[Any], sizes: Mapping[str, int], order: str | None, slices: str | None
) -> np.ndarray:
    """Returns these devices as an array of the mesh's shape, in which each slice is a block.

    With a single slice, `slices` has no effect.
    """
    groups = slices_of(devices)
    if slices is None and len(groups) > 1 and devices[0].platform == "tpu":
        raise UserError(
            f"Layout.slices = None: the devices are in {len(groups)} slices.  Say which mesh axis "
            f'the network between them connects, as in Layout.slices = "{next(iter(sizes))}:-1".'
        )
    if slices is None or len(groups) == 1:
        return in_order(devices, sizes, order)
    counts = slice_counts(slices, sizes, len(groups))
    inside = {name: size // counts[name] for name, size in sizes.items()}
    return side_by_side([in_order(group, inside, order) for group in groups], [*counts.values()])


def slices_of(devices: Sequence[Any]) -> list[list[Any]]:
    """Groups devices by slice, or by process if they are not TPUs and all on one slice.

    JAX knows the slices of TPUs and GPUs; several processes on one host can stand in for slices.
    """

    def grouped(attribute: str) -> list[list[Any]]:
        groups: dict[int, list[Any]] = {}
        for device in devices:
            groups.setdefault(getattr(device, attribute, None) or 0, []).append(device)
        return [groups[index] for index in sorted(groups)]

    slices = grouped("slice_index")
    if len(slices) > 1 or devices[0].platform == "tpu":
        return slices
    return grouped("process_index")


def slice_counts(text: str, mesh: Mapping[str, int], count: int | None = None) -> dict[str, int]:
    """Parses the number of slices along each mesh axis; -1 is what the others leave of `count`.

    Without a count, -1 becomes 1.
    """
    head = f"Layout.slices = {text!r}"
    given = numbers_by_axis(text, head, SLICES_EXAMPLE)
    for name, size in given.items():
        if name not in mesh:
            near = did_you_mean(name, mesh)
            raise UserError(f"{head}: no such mesh axis: {name}.{near}  Legal: {', '.join(mesh)}.")
        if size < 1 and size != -1:
            raise UserError(f"{head}: {name}:{size} is not a number of slices.  {SLICES_EXAMPLE}")
    open_axes = [name for name, size in given.items() if size == -1]
    fixed = math.prod(size for size in given.values() if size != -1)
    if open_axes:
        given[open_axes[0]] = max(1, (count or fixed) // fixed)
    if count is not None and math.prod(given.values()) != count:
        made = math.prod(given.values())
        raise UserError(f"{head}: {made} slices, and the devices are in {count}.  {SLICES_EXAMPLE}")
    for name, size in given.items():
        if mesh[name] % size:
            raise UserError(f"{head}: {size} slices do not divide {name} = {mesh[name]}.")
    return {name: given.get(name, 1) for name in mesh}


def side_by_side(meshes: Sequence[np.ndarray], counts: Sequence[int]) -> np.ndarray:
    """Joins arrays of devices, one per slice, into one array with `counts` slices along each axis.

    `jax.experimental.mesh_utils.create_hybrid_device_mesh` does the same with arrays that it makes.
    """
    blocks = np.empty(len(meshes), object)
    for i, mesh in enumerate(meshes):
        blocks[i] = mesh
    return np.block(blocks.reshape(tuple(counts)).tolist())


def in_order(devices: Sequence[Any], sizes: Mapping[str, int], order: str | None) -> np.ndarray:
    """Returns these devices as an array of the mesh's shape, in `order` if they are on a torus."""
    torus = torus_of(devices)
    if order is None or torus is None:
        shape = tuple(sizes.values())
        return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    check_order(order, sizes, torus)
    by_place = np.empty(len(devices), object)
    by_place[:] = sorted(devices, key=coordinates)
    return by_place[device_permutation(order, sizes, torus)]


def abstract_mesh(
    sizes: dict[str, int], kind: str | None = None, platform: str = "tpu"
) -> AbstractMesh:
    """Makes a mesh without devices, to trace on: for chips of a kind, or for any device."""
    device = None
    if kind is not None:
        device = AbstractDevice(device_kind=kind, num_cores=None, platform=platform)
    types = (AxisType.Explicit,) * len(sizes)
    return AbstractMesh(tuple(sizes.values()), tuple(sizes), types, abstract_device=device)


def use_mesh(mesh: Mesh | AbstractMesh) -> contextlib.AbstractContextManager[Any]:
    """Sets a concrete or an abstract mesh inside a `with` statement."""
    if isinstance(mesh, Mesh):
        return jax.set_mesh(mesh)
    return jax.sharding.use_abstract_mesh(mesh)
