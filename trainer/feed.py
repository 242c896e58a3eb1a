"""Places batches of the host on devices, for any number of hosts and any layout."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from configs.errors import UserError
from data.order import batches
from data.packing.rows import Rows
from layouts.layout import Layout
from layouts.mesh import batch_shards

HostBatch = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Placement:
    """Places the arrays of a batch by the letters that their names end in."""

    layout: Layout
    mesh: Mesh | AbstractMesh
    microbatches: int
    rows_together: int = 1
    """Neighbouring rows that no two microbatches share: experts serve their tokens together."""

    def of(self, name: str, rows: int) -> NamedSharding:
        """Returns an array's sharding; several microbatches, of so many rows, are its first axis.

        Rows that do not divide and are to be padded come replicated: the model pads them.
        """
        axes = name.rpartition("_")[2]
        if self.layout.pads("B") and rows % batch_shards(self.layout, self.mesh.shape):
            axes = axes.replace("B", "b")
        return NamedSharding(
            self.mesh, self.layout.place(axes if self.microbatches == 1 else f"a{axes}")
        )


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
    rows_only = NamedSharding(
        shardings.mesh, jax.P(*shardings.of("targets_BL", places).spec[: batch_axis + 1])
    )
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
        length, places = rows.shape[1], batch_sequences // microbatches
        pieces = rows.reshape(-1, microbatches, shardings.rows_together, length)
        rows = pieces.swapaxes(0, 1).reshape(microbatches, -1, length)
        shape: tuple[int, ...] = (microbatches, places, length)
        if microbatches == 1:
            rows, shape = rows[0], shape[1:]

        def part(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None
            return part_of(rows, first, index, places)

        return jax.make_array_from_callback(shape, shardings.of(name, places), part)

    return {name: put(name, rows) for name, rows in batch.items()}


def abstract_batch(
    lengths: Mapping[str, int], shardings: Placement, batch_sequences: int, microbatches: int
) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns shapes, types and shardings of a batch, from the row length of each of its arrays."""
    places = batch_sequences // microbatches
    batch = {}
    for name, length in lengths.items():
        shape = (places, length) if microbatches == 1 else (microbatches, places, length)
        batch[name] = jax.ShapeDtypeStruct(shape, np.int32, sharding=shardings.of(name, places))
    return batch


def part_of(
    rows: np.ndarray, first: int, index: tuple[slice, ...], places: int
) -> np.ndarray[Any, Any]:
    """Returns one device's part of the rows that its host has read, from the first of them on.

    A host whose rows are not neighbours has read those between them too.
    """
    *microbatch, of_rows, across = index
    start, stop, _ = of_rows.indices(places)
    return rows[(*microbatch, slice(start - first, stop - first), across)]


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
