"""Shards host batches over devices, for any number of hosts and any layout."""

import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Self, TypeVar

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from configs.errors import UserError
from layouts.layout import Layout
from layouts.mesh import batch_shards
from layouts.shards import mesh_axes
from trainer.run import Run

HostBatch = dict[str, np.ndarray]
T = TypeVar("T")


def whole_batch(run: Run, layout: Layout, sizes: Mapping[str, int], rows: int) -> int:
    """Rounds rows up to a batch with equal shards, which hold complete groups of tokens.

    A group may span several rows, or be a single row if no tokens are dropped.  `sizes` are the
    sizes of the mesh axes.
    """
    multiple = batch_shards(layout, sizes, rows_are_groups=True) * run.rows_together
    return -(-rows // multiple) * multiple


@dataclasses.dataclass(frozen=True)
class BatchSharding:
    """Shards the arrays of a global batch by the letters that their names end in."""

    layout: Layout
    mesh: Mesh | AbstractMesh
    batch_sequences: int
    microbatches: int = 1
    rows_together: int = 1
    """Neighbouring rows that stay in one microbatch: experts serve their tokens together."""

    @classmethod
    def of(cls, run: Run, layout: Layout, mesh: Mesh | AbstractMesh) -> Self:
        """Returns the sharding of training batches."""
        return cls(layout, mesh, run.batch_sequences, run.microbatches, run.rows_together)

    @property
    def microbatch_rows(self) -> int:
        return self.batch_sequences // self.microbatches

    @property
    def leading(self) -> tuple[int, ...]:
        """Returns the sizes before the row axis: the number of microbatches if above 1."""
        return (self.microbatches,) if self.microbatches > 1 else ()

    def sharding(self, name: str, of_row: Sequence[int]) -> NamedSharding:
        """Returns an array's sharding, given its shape in a row.

        Axes that do not divide but may be padded are replicated here; the model pads them.
        """
        sizes = zip(name.rpartition("_")[2], (self.microbatch_rows, *of_row), strict=True)
        axes = "".join(
            letter.lower() if self.layout.pads(letter) and size % self.shards(letter) else letter
            for letter, size in sizes
        )
        return NamedSharding(self.mesh, self.layout.place("a" * len(self.leading) + axes))

    def shards(self, letter: str) -> int:
        """Returns the number of shards into which the layout splits an axis."""
        names = mesh_axes(self.layout.place(letter)[0])
        return math.prod(self.mesh.shape.get(name, 1) for name in names)

    def host_rows(self) -> tuple[int, int]:
        """Returns the first and last (exclusive) row of the global batch on this host's devices.

        Microbatches are interleaved: rows that stay together are one piece, and piece p goes to
        microbatch p % microbatches.  So a host's rows of all microbatches are consecutive.
        """
        count, together = self.microbatch_rows, self.rows_together
        of_targets = self.sharding("targets_BL", (self.shards("L"),)).spec
        batch_axes = of_targets[len(self.leading)]
        rows_only = NamedSharding(self.mesh, jax.P(batch_axes))
        try:
            indices = [i for i in rows_only.addressable_devices_indices_map((count,)).values() if i]
        except ValueError:
            raise UserError(
                f"Run.batch_sequences = {self.batch_sequences} in {self.microbatches} "
                f"microbatches: {count} rows do not divide over the mesh {dict(self.mesh.shape)} "
                f"by batch = {batch_axes}.  Choose a multiple, or fewer microbatches."
            ) from None
        ranges = [rows.indices(count) for (rows,) in indices]
        start, stop = min(r[0] for r in ranges), max(r[1] for r in ranges)
        start, stop = start // together * together, -(-stop // together) * together
        return start * self.microbatches, stop * self.microbatches

    def to_global_arrays(self, batch: HostBatch) -> dict[str, jax.Array]:
        """Makes global arrays from this host's rows."""
        first, count = self.host_rows()[0] // self.microbatches, self.microbatch_rows
        arrays = dict[str, jax.Array]()
        for name, rows in batch.items():
            of_row = rows.shape[1:]
            pieces = rows.reshape(-1, self.microbatches, self.rows_together, *of_row)
            rows = pieces.swapaxes(0, 1).reshape(*self.leading, -1, *of_row)
            shape, row_axis = (*self.leading, count, *of_row), len(self.leading)
            part = functools.partial(part_of, rows, first, count=count, row_axis=row_axis)
            arrays[name] = jax.make_array_from_callback(shape, self.sharding(name, of_row), part)
        return arrays

    def abstract(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns shapes, types and shardings of a batch, given each array's shape in a row."""
        rows = (*self.leading, self.microbatch_rows)
        shardings = {name: self.sharding(name, of_row) for name, of_row in shapes.items()}
        return {
            name: jax.ShapeDtypeStruct((*rows, *shapes[name]), np.int32, sharding=sharding)
            for name, sharding in shardings.items()
        }


def part_of(
    rows: np.ndarray, first: int, index: tuple[slice, ...], count: int, row_axis: int = 0
) -> np.ndarray[Any, Any]:
    """Returns one device's part of a host's rows, which begin at row `first` of `count`.

    A host whose rows are not contiguous has also read the rows between them.
    """
    start, stop, _ = index[row_axis].indices(count)
    return rows[(*index[:row_axis], slice(start - first, stop - first), *index[row_axis + 1 :])]


def dispatch_ahead(dispatched: Iterable[T]) -> Iterator[T]:
    """Yields each output after the next call is dispatched, so devices compute during a fetch."""
    previous: list[T] = []
    for output in dispatched:
        yield from previous
        previous = [output]
    yield from previous
