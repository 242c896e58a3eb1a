"""Connects the processes of one run, and compares their values."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding

from configs.errors import MAX_SHOWN, UserError, brief
from trainer.processes import peers
from trainer.processes.peers import is_first_process as is_first_process

T = TypeVar("T")


def connect(mesh: Mesh) -> None:
    """Runs a collective in every group of devices of the mesh, one group after the other.

    On CPUs, XLA connects a group at its first collective, and meanwhile locks the process.
    Two processes that began with different groups would wait for each other until they time out.
    """
    if jax.process_count() == 1 or mesh.devices.flat[0].platform != "cpu":
        return
    for group in _groups(mesh):
        group_mesh = Mesh(group, ("all",))
        if group_mesh.is_multi_process and group_mesh.local_devices:
            sharded = NamedSharding(group_mesh, jax.P("all"))
            replicated = NamedSharding(group_mesh, jax.P())
            local = np.ones(len(group_mesh.local_devices), np.float32)
            ones = jax.make_array_from_process_local_data(sharded, local)
            jax.block_until_ready(jax.jit(jnp.sum, out_shardings=replicated)(ones))


def gather(value: T) -> list[T]:
    """Returns the values of all processes of the run, by index; JSON must be able to hold them."""
    others = peers.current()
    return [value] if others is None else others.gather(value)


def from_first_process(call: Callable[[], T]) -> T:
    """Returns in every process what only the first one computes; JSON must be able to hold it.

    An exception in the call ends all processes.
    """
    value: Any = call() if is_first_process() else None
    return gather(value)[0]


def fetched(arrays: Sequence[jax.Array]) -> list[np.ndarray]:
    """Returns unsharded arrays on the host, in every process of the run."""
    return [*multihost_utils.process_allgather(tuple(arrays), tiled=True)]


def check_same(values: Mapping[str, str], remedy: str) -> None:
    """Raises in every process, naming what differs, unless all have the same values."""
    of_all = gather(dict(values))
    first, problems = of_all[0], []
    for index, other in enumerate(of_all):
        for name in {**first, **other}:
            if first.get(name) != other.get(name):
                problems.append(
                    f"{name}: {brief(first.get(name, 'absent'))} in process 0, "
                    f"{brief(other.get(name, 'absent'))} in process {index}."
                )
    if problems:
        shown = [*problems[:MAX_SHOWN], *(["…"] if problems[MAX_SHOWN:] else [])]
        raise UserError("\n  ".join(["the processes of this run differ:", *shown, remedy]))


def _groups(mesh: Mesh) -> list[np.ndarray]:
    """Lists the groups of devices along each combination of mesh axes."""
    sizes, groups = mesh.devices.shape, []
    for count in range(1, len(sizes) + 1):
        for axes in itertools.combinations(range(len(sizes)), count):
            last = np.moveaxis(mesh.devices, axes, range(-count, 0))
            groups += list(last.reshape(-1, math.prod(sizes[axis] for axis in axes)))
    return groups
