"""Host batches to device batches, for any number of hosts and any layout."""

from collections.abc import Iterator

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from configs.errors import UserError
from data.order import batches
from data.rows import Rows
from layouts.layout import Layout

HostBatch = dict[str, np.ndarray]


def placement(layout: Layout, mesh: Mesh, microbatches: int) -> NamedSharding:
    """Where a batch lives; several microbatches are a leading axis."""
    return NamedSharding(mesh, layout.place("BL" if microbatches == 1 else "aBL"))


def host_rows(sharding: NamedSharding, batch_sequences: int, microbatches: int) -> tuple[int, int]:
    """The first and last (exclusive) row of the global batch that this host's devices hold.

    Row r is place r // microbatches of microbatch r % microbatches, so that what a host holds of
    every microbatch is one run of rows.
    """
    places = batch_sequences // microbatches
    batch_axis = 0 if microbatches == 1 else 1
    shape = (places,) if microbatches == 1 else (microbatches, places)
    rows_only = NamedSharding(sharding.mesh, jax.P(*sharding.spec[: batch_axis + 1]))
    try:
        held = [i for i in rows_only.addressable_devices_indices_map(shape).values() if i]
    except ValueError:
        raise UserError(
            f"Run.batch_sequences = {batch_sequences} in {microbatches} microbatches: {places} "
            f"rows do not divide over the mesh {dict(sharding.mesh.shape)} by batch = "
            f"{sharding.spec[batch_axis]}.  Choose a multiple, or fewer microbatches."
        ) from None
    ranges = [index[batch_axis].indices(places) for index in held]
    start, stop = min(r[0] for r in ranges), max(r[1] for r in ranges)
    return start * microbatches, stop * microbatches


def place(
    sharding: NamedSharding, batch: HostBatch, batch_sequences: int, microbatches: int
) -> dict[str, jax.Array]:
    """This host's rows as parts of global arrays."""

    def put(rows: np.ndarray) -> jax.Array:
        length = rows.shape[1]
        if microbatches == 1:
            shape: tuple[int, ...] = (batch_sequences, length)
        else:
            rows = rows.reshape(-1, microbatches, length).swapaxes(0, 1)
            shape = (microbatches, batch_sequences // microbatches, length)
        return jax.make_array_from_process_local_data(sharding, rows, shape)

    return {name: put(rows) for name, rows in batch.items()}


def feed(
    rows: Rows,
    sharding: NamedSharding,
    *,
    seed: int,
    batch_sequences: int,
    microbatches: int,
    first_step: int,
) -> Iterator[tuple[np.ndarray, dict[str, jax.Array]]]:
    """Row ids and device batches of one step after the other."""
    held = host_rows(sharding, batch_sequences, microbatches)
    for row_ids, batch in batches(rows, seed, batch_sequences, first_step, held):
        yield row_ids, place(sharding, batch, batch_sequences, microbatches)
