"""Places batches of the host on devices, for any number of hosts and any layout."""

import dataclasses
import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from configs.errors import UserError
from data.order import batches
from data.packing.rows import Rows
from layouts.layout import Layout
from layouts.shards import mesh_axes

HostBatch = dict[str, np.ndarray]
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Placement:
    """Places the arrays of a batch by the letters that their names end in."""

    layout: Layout
    mesh: Mesh | AbstractMesh
    microbatches: int
    rows_together: int = 1
    """Neighbouring rows that no two microbatches share: experts serve their tokens together."""

    def of(self, name: str, shape: Sequence[int]) -> NamedSharding:
        """Returns an array's sharding; several microbatches, of this shape, are its first axis.

        Axes that do not divide and are to be padded come replicated: the model pads them.
        """
        axes = "".join(
            letter.lower() if self.layout.pads(letter) and size % self.shards(letter) else letter
            for letter, size in zip(name.rpartition("_")[2], shape, strict=True)
        )
        return NamedSharding(
            self.mesh, self.layout.place(axes if self.microbatches == 1 else f"a{axes}")
        )

    def shards(self, letter: str) -> int:
        """Returns into how many shards the layout splits an axis."""
        names = mesh_axes(self.layout.place(letter)[0])
        return math.prod(self.mesh.shape.get(name, 1) for name in names)


def placement(
    layout: Layout, mesh: Mesh | AbstractMesh, microbatches: int, rows_together: int = 1
) -> Placement:
    return Placement(layout, mesh, microbatches, rows_together)


def host_rows(shardings: Placement, batch_sequences: int, microbatches: int) -> tuple[int, int]:
    """Returns the first and last (exclusive) row of the global batch on this host's devices.

    Microbatches take turns: rows that stay together are one piece, and piece p goes to microbatch
    p % microbatches.  So what a host holds of every microbatch is one run of rows.
    """
    places = batch_sequences // microbatches
    batch_axis = 0 if microbatches == 1 else 1
    shape = (places,) if microbatches == 1 else (microbatches, places)
    of_targets = shardings.of("targets_BL", (places, shardings.shards("L")))
    rows_only = NamedSharding(shardings.mesh, jax.P(*of_targets.spec[: batch_axis + 1]))
    try:
        indices = [i for i in rows_only.addressable_devices_indices_map(shape).values() if i]
    except ValueError:
        raise UserError(
            f"Run.batch_sequences = {batch_sequences} in {microbatches} microbatches: {places} "
            f"rows do not divide over the mesh {dict(shardings.mesh.shape)} by batch = "
            f"{rows_only.spec[batch_axis]}.  Choose a multiple, or fewer microbatches."
        ) from None
    ranges = [index[batch_axis].indices(places) for index in indices]
    start, stop = min(r[0] for r in ranges), max(r[1] for r in ranges)
    together = shardings.rows_together
    start, stop = start // together * together, -(-stop // together) * together
    return start * microbatches, stop * microbatches


def place(
    shardings: Placement, batch: HostBatch, batch_sequences: int, microbatches: int
) -> dict[str, jax.Array]:
    """Makes global arrays, of which this host has these rows."""
    first = host_rows(shardings, batch_sequences, microbatches)[0] // microbatches

    def put(name: str, rows: np.ndarray) -> jax.Array:
        of_row, places = rows.shape[1:], batch_sequences // microbatches
        pieces = rows.reshape(-1, microbatches, shardings.rows_together, *of_row)
        rows = pieces.swapaxes(0, 1).reshape(microbatches, -1, *of_row)
        shape: tuple[int, ...] = (microbatches, places, *of_row)
        sharding = shardings.of(name, shape[1:])
        if microbatches == 1:
            rows, shape = rows[0], shape[1:]

        def part(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None
            return part_of(rows, first, index, places, row_axis=int(microbatches > 1))

        return jax.make_array_from_callback(shape, sharding, part)

    return {name: put(name, rows) for name, rows in batch.items()}


def abstract_batch(
    shapes: Mapping[str, tuple[int, ...]],
    shardings: Placement,
    batch_sequences: int,
    microbatches: int,
) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns shapes, types and shardings of a batch, from the shape of each array in a row."""
    leading = () if microbatches == 1 else (microbatches,)
    batch = {}
    for name, of_row in shapes.items():
        shape = (batch_sequences // microbatches, *of_row)
        sharding = shardings.of(name, shape)
        batch[name] = jax.ShapeDtypeStruct((*leading, *shape), np.int32, sharding=sharding)
    return batch


def part_of(
    rows: np.ndarray, first: int, index: tuple[slice, ...], places: int, row_axis: int = 0
) -> np.ndarray[Any, Any]:
    """Returns one device's part of the rows that its host has read, from the first of them on.

    A host whose rows are not neighbours has read those between them too.
    """
    start, stop, _ = index[row_axis].indices(places)
    here = slice(start - first, stop - first)
    return rows[(*index[:row_axis], here, *index[row_axis + 1 :])]


def dispatch_ahead(dispatched: Iterable[T]) -> Iterator[T]:
    """Yields each output when the next call is dispatched: devices compute while it is fetched."""
    outputs = deque[T]()
    for output in dispatched:
        outputs.append(output)
        if len(outputs) > 1:
            yield outputs.popleft()
    yield from outputs


def feed(
    rows: Rows,
    shardings: Placement,
    *,
    seed: int,
    batch_sequences: int,
    microbatches: int,
    first_step: int,
) -> Iterator[tuple[np.ndarray, dict[str, jax.Array]]]:
    """Yields the row ids and the device batch of one step after the other."""
    host = host_rows(shardings, batch_sequences, microbatches)
    for row_ids, batch in batches(rows, seed, batch_sequences, first_step, host):
        yield row_ids, place(shardings, batch, batch_sequences, microbatches)
