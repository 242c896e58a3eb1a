"""Makes meshes of devices; sets up virtual devices and the compilation cache."""

import contextlib
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh

from configs.errors import UserError
from layouts.device_order import check_order, coordinates, device_permutation, torus_of
from layouts.layout import Layout
from layouts.shards import mesh_axes
from layouts.slices import numbers_by_axis, side_by_side, slice_counts, slices_of


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
    """Disables the cache: programs for devices that are not there cannot be loaded from it."""
    from jax.experimental.compilation_cache import compilation_cache

    enabled = jax.config.values["jax_enable_compilation_cache"]
    try:
        jax.config.update("jax_enable_compilation_cache", False)
        compilation_cache.reset_cache()
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", enabled)
        compilation_cache.reset_cache()


def mesh_sizes(text: str, devices: int | None) -> dict[str, int]:
    """Parses sizes by mesh axis; -1 becomes what the other sizes leave of the devices.

    Without devices the sizes are taken as they are, to look at a layout for another machine.

    >>> mesh_sizes("data:-1,model:4", 8)
    {'data': 2, 'model': 4}
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
            f"{head}: needs {rest} devices, found {devices}.  Set one size to -1 "
            f"to take what there is, or add --simulate_devices={rest} to try it on this machine."
        )
    return sizes


def batch_shards(layout: Layout, sizes: Mapping[str, int], *, rows_are_groups: bool = False) -> int:
    """Returns the number of which the rows of a batch must be a multiple.

    rows_are_groups: whether each row is also a group of tokens, as in layers of experts that drop
    no tokens.  Unknown mesh axes are left to the lint.
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
    """Makes a mesh of these devices, in `order` if they have coordinates, else in JAX's."""
    array = over_slices(devices, sizes, order, slices)
    return Mesh(array, tuple(sizes), axis_types=(AxisType.Explicit,) * len(sizes))


def over_slices(
    devices: Sequence[Any], sizes: Mapping[str, int], order: str | None, slices: str | None
) -> np.ndarray:
    """Returns these devices as an array of the mesh's sizes; each slice is a part of it.

    One slice alone is in order, whatever is said of several.
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


def in_order(devices: Sequence[Any], sizes: Mapping[str, int], order: str | None) -> np.ndarray:
    """Returns these devices as an array of the mesh's sizes."""
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
