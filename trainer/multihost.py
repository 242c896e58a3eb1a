"""Connections between the processes of one run."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding


def connect(mesh: Mesh) -> None:
    """Lets every group of devices of the mesh meet once, one group after the other.

    On CPUs XLA connects a group at its first collective and holds a lock of the process meanwhile:
    two processes that begin with different groups wait for each other until they time out.
    """
    if jax.process_count() == 1 or mesh.devices.flat[0].platform != "cpu":
        return
    for group in _groups(mesh):
        processes = {device.process_index for device in group}
        if len(processes) > 1 and jax.process_index() in processes:
            group_mesh = Mesh(group, ("all",))
            sharded, replicated = (
                NamedSharding(group_mesh, spec) for spec in (jax.P("all"), jax.P())
            )
            local_devices = sum(device.process_index == jax.process_index() for device in group)
            ones = jax.make_array_from_process_local_data(
                sharded, np.ones(local_devices, np.float32)
            )
            jax.block_until_ready(jax.jit(jnp.sum, out_shardings=replicated)(ones))


def on_any_process(value: bool) -> bool:
    """Returns whether it is true in any process of the run: what all of them then do."""
    if jax.process_count() == 1:
        return value
    return bool(np.any(multihost_utils.process_allgather(np.array(value))))


def gather_texts(text: str) -> list[str]:
    """Returns the text of each process of the run, in the order of their indices."""
    if jax.process_count() == 1:
        return [text]
    encoded = np.frombuffer(text.encode(), np.uint8)
    sizes = np.asarray(multihost_utils.process_allgather(np.int32(len(encoded))))
    padded = np.pad(encoded, (0, int(sizes.max()) - len(encoded)))
    rows = np.asarray(multihost_utils.process_allgather(padded))
    return [row[:size].tobytes().decode() for row, size in zip(rows, sizes, strict=True)]


def _groups(mesh: Mesh) -> list[np.ndarray]:
    """Lists the devices that differ in some mesh axes only, for each choice of mesh axes."""
    sizes, groups = mesh.devices.shape, []
    for count in range(1, len(sizes) + 1):
        for axes in itertools.combinations(range(len(sizes)), count):
            last = np.moveaxis(mesh.devices, axes, range(-count, 0))
            groups += list(last.reshape(-1, math.prod(sizes[axis] for axis in axes)))
    return groups
