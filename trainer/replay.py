"""Repeats steps with the devices in another order, and compares the results.

A step's result does not depend on which device holds which shard.  If it does, a device computes
wrong results (silent data corruption; Hochschild et al. 2021, Dixit et al. 2021).
"""

import functools
import itertools
import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.tree_util import GetAttrKey

from configs.errors import MAX_SHOWN, RunError
from layouts.shards import mesh_axes, spec_of
from models.api import Params
from trainer.multihost import gather
from trainer.step import Metrics, State

logger = logging.getLogger(__name__)

Step = Callable[[State, Any], tuple[State, Metrics]]
Names = Sequence[str]  # of devices
Kinds = dict[str, list[jax.Array]]
WEIGHTS = "weights"
Numbers = tuple[float, ...]
Replayed = tuple[Kinds, dict[int, Numbers]]
"""The result of a step on the other mesh, and the norms of the changes of each device's shards, by
the device's position in the mesh."""
TOLERANCE = 0.1
"""Largest distance between two results of a shard, relative to its change.  Round-off of sums over
devices stays below it, though Adam may turn tiny gradients of another sign into full updates."""
PROBE_ROUNDS, PROBE_SIZE = 8, 512


def rotated(mesh: Mesh) -> Mesh:
    """Returns a mesh in which each process's devices have moved by one position."""
    devices = mesh.devices.flatten()
    processes = np.array([device.process_index for device in devices])
    for process in set(processes):
        here = np.flatnonzero(processes == process)
        devices[here] = np.roll(devices[here], 1)
    return Mesh(devices.reshape(mesh.devices.shape), mesh.axis_names, axis_types=mesh.axis_types)


def moved(tree: Any, mesh: Mesh, other: Mesh) -> Any:
    """Copies arrays so that each shard is on the device at the same position in another mesh."""
    there = dict(zip(mesh.devices.flat, other.devices.flat, strict=True))

    def move(array: jax.Array) -> jax.Array:
        here = array.addressable_shards
        shards = [jax.device_put(x.data, there[x.device], may_alias=False) for x in here]
        sharding = NamedSharding(other, spec_of(array))
        return jax.make_array_from_single_device_arrays(array.shape, sharding, shards)

    return jax.tree.map(move, tree)


class Replay:
    """Computes steps on the rotated mesh as well, and raises if the results disagree."""

    def __init__(self, mesh: Mesh, step_there: Step, trained: Callable[[Params], Params]):
        """Sets the step compiled for the rotated mesh, and a function that selects its weights."""
        self._mesh, self._there, self._trained = mesh, rotated(mesh), trained
        self._step_there = step_there
        if mesh == self._there:
            logger.warning(
                "Run.replay_every: each process has one device, which recomputes its own steps: "
                "only errors that do not repeat are detected."
            )

    def _compared(self, state: State) -> Kinds:
        """Returns the arrays that are compared, by kind: weights, first moments, ..."""
        kinds = {WEIGHTS: jax.tree.leaves(self._trained(state["params"]))}
        for path, array in jax.tree.leaves_with_path(state["opt_state"]):
            if jnp.issubdtype(array.dtype, jnp.floating):
                kind = "".join(str(key) for key in path if isinstance(key, GetAttrKey))
                kinds.setdefault(kind, []).append(array)
        return kinds

    def compute(self, state: State, batch: Any) -> Replayed:
        """Computes a step on the other mesh."""
        copies = (moved(tree, self._mesh, self._there) for tree in (state, batch))
        after, _ = self._step_there(*copies)
        compared = moved(self._compared(after), self._there, self._mesh)
        changes = on_each_device(self._mesh, change, compared, self._compared(state))
        return compared, by_place(changes)

    def check(self, step: int, replayed: Replayed, state: State) -> None:
        """Raises RunError if the state after a step differs, or replicas of its shards do."""
        here, there = ([*map(str, m.devices.flat)] for m in (self._mesh, self._there))
        compared, changes = replayed
        apart = by_place(on_each_device(self._mesh, distance, compared, self._compared(state)))
        shares = {p: max(map(share, apart[p], changes[p])) for p in apart}
        if wrong := {place: part for place, part in shares.items() if not part <= TOLERANCE}:
            odd = [here[place] for place in odd_ones(probes(self._mesh))]
            raise RunError(describe(step, wrong, here, there, odd))
        if different := [here[place] for place in different_replicas(self._mesh, state)]:
            raise RunError(
                f"After step {step}, devices that hold the same shards have different numbers: "
                f"{' or '.join(different)} has computed wrong results since the last replay.  "
                "Replace it, and continue from a checkpoint before that."
            )


def describe(step: int, wrong: Mapping[int, float], here: Names, there: Names, odd: Names) -> str:
    """Describes which shards differ, and which device computes wrong results: an odd one, or one
    that has computed all of these shards."""
    common = set.intersection(*({here[place], there[place]} for place in wrong))
    blamed = " or ".join(odd or sorted(common))
    is_sure = odd or len(wrong) == 1
    spread = "" if is_sure else ", unless sums spread an error that a neighbour made once"
    rows = [
        f"shard {place}: on {here[place]}, then on {there[place]}: {part:.2g} of the update apart"
        for place, part in wrong.items()
    ]
    more = [f"… and {len(rows) - MAX_SHOWN:,} more"] * (len(rows) > MAX_SHOWN)
    cause = (
        f"{blamed} computes wrong results{spread}.  Replace it"
        if blamed
        else "Sums over devices spread the error of one of them to all.  Find it with `meshloom "
        "doctor --devices`"
    )
    remedy = f"{cause}, and continue from a checkpoint before the last replay."
    lines = [*rows[:MAX_SHOWN], *more, remedy]
    title = f"Step {step} gives a different state when the devices compute each other's shards"
    return "\n  ".join([f"{title}:", *lines])


def share(distance: float, update: float) -> float:
    """Returns a distance relative to an update."""
    return distance / update if update else math.inf if distance else 0.0


def distance(arrays: Kinds, others: Kinds) -> jax.Array:
    """Returns the norms of the differences of a device's shards, by kind."""

    def squares(x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.sum(jnp.square(x.astype(float) - y.astype(float)))

    lengths = [sum(map(squares, arrays[kind], others[kind])) for kind in sorted(arrays)]
    return jnp.sqrt(jnp.stack(lengths))[None]


def change(arrays: Kinds, others: Kinds) -> jax.Array:
    """Returns the norms of the changes.  For moments and averages, they are at least TOLERANCE
    times the arrays' norms: with constant gradients, moments change little beyond round-off."""
    floors = jnp.array([0 if kind == WEIGHTS else TOLERANCE for kind in sorted(arrays)], float)
    nothing = jax.tree.map(jnp.zeros_like, others)
    return jnp.maximum(distance(arrays, others), floors * distance(arrays, nothing))


def different_replicas(mesh: Mesh, tree: Any) -> list[int]:
    """Returns the positions in the mesh whose shards differ from their replicas elsewhere."""
    arrays: Kinds = {}  # by the mesh axes that split them
    for array in jax.tree.leaves(tree):
        used = {name for entry in spec_of(array).partitions for name in mesh_axes(entry)}
        arrays.setdefault(" ".join(sorted(used)), []).append(array)
    sums, different = by_place(on_each_device(mesh, checksum, arrays)), set[int]()
    for number, names in enumerate(sorted(arrays)):
        split = [name in names.split() for name in mesh.axis_names]
        replicas: dict[tuple[int, ...], dict[int, Numbers]] = {}
        for place, numbers in sums.items():
            shard = np.unravel_index(place, mesh.devices.shape)
            key = tuple(int(i) for i, is_split in zip(shard, split, strict=True) if is_split)
            replicas.setdefault(key, {})[place] = numbers[number : number + 1]
        for same in replicas.values():
            if len({*same.values()}) > 1:
                different.update(odd_ones(same) or same)
    return sorted(different)


def checksum(arrays: Kinds) -> jax.Array:
    """Returns sums over the bits of a device's shards."""

    def bits(x: jax.Array) -> jax.Array:
        words = {1: jnp.uint8, 2: jnp.uint16}.get(x.dtype.itemsize, jnp.uint32)
        return jnp.sum(jax.lax.bitcast_convert_type(x, words).astype(jnp.uint32))

    sums = [sum(map(bits, arrays[name]), jnp.zeros((), jnp.uint32)) for name in sorted(arrays)]
    return jnp.stack(sums)[None]


def probes(mesh: Mesh) -> dict[int, Numbers]:
    """Returns each device's result of the same computation, by position in the mesh."""
    return by_place(on_each_device(mesh, probe))


def probe() -> jax.Array:
    rng = np.random.default_rng(0)
    numbers = rng.normal(0, PROBE_SIZE**-0.5, (PROBE_SIZE, PROBE_SIZE)).astype(np.float32)
    x = w = jnp.asarray(numbers)
    for _ in range(PROBE_ROUNDS):
        x = jnp.tanh(2 * x @ w)
    return jnp.sum(x)[None, None]


@functools.partial(jax.jit, static_argnums=(0, 1))
def on_each_device(mesh: Mesh, call: Callable[..., jax.Array], *trees: Params) -> jax.Array:
    """Returns the numbers that each device computes from its shards, in mesh order."""
    specs = jax.tree.map(spec_of, trees)
    every = jax.P(mesh.axis_names)
    return jax.shard_map(call, mesh=mesh, in_specs=specs, out_specs=every, check_vma=False)(*trees)


def by_place(numbers: jax.Array) -> dict[int, Numbers]:
    """Returns the numbers of each device of all processes, by position in the mesh."""
    shards = numbers.addressable_shards
    here = [(shard.index[0].start or 0, np.asarray(shard.data)[0].tolist()) for shard in shards]
    return {place: tuple(row) for place, row in itertools.chain.from_iterable(gather(here))}


def odd_ones(results: Mapping[int, Numbers]) -> list[int]:
    """Returns the positions whose results differ from the majority's; none without a majority."""
    usual, count = Counter(results.values()).most_common(1)[0]
    is_majority = 2 * count > len(results)
    return [place for place, result in results.items() if is_majority and result != usual]
