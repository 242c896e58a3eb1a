"""Rejects what does not fit in the memory of the devices, before any preparation."""

import math
import os
from typing import Any

import jax
from jax.sharding import Mesh

from configs.errors import UserError
from layouts.layout import Layout
from trainer.feed import BatchSharding
from trainer.run import Run
from trainer.step import abstract_state, train_step_spec


def check_memory(run: Run, layout: Layout, mesh: Mesh) -> None:
    """Raises if weights, optimizer state and batch alone need more memory than a device has."""
    state_bytes = shard_bytes(abstract_state(train_step_spec(run, layout), mesh))
    copies = ""
    if run.replay_every is not None:
        state_bytes, copies = 2 * state_bytes, ", twice (Run.replay_every),"
    batch_bytes = _batch_bytes(run, layout, mesh, run.batch_sequences, run.microbatches)
    _check(
        mesh,
        state_bytes + batch_bytes,
        f"the run does not fit: {state_bytes:,} bytes of weights and optimizer state{copies} and "
        f"{batch_bytes:,} of the batch",
        "Choose smaller sizes, more devices, or a layout that splits more (meshloom plan).",
    )


def check_batch_memory(run: Run, layout: Layout, mesh: Mesh, rows: int) -> None:
    """Raises if a batch of this many rows needs more memory than a device has."""
    batch_bytes = _batch_bytes(run, layout, mesh, rows)
    problem = f"--batch_sequences={rows}: a batch needs {batch_bytes:,} bytes"
    _check(mesh, batch_bytes, problem, "Choose a smaller one.")


def check_cache_memory(params: Any, cache: Any, mesh: Mesh) -> None:
    """Raises if weights and the decoding cache alone need more memory than a device has."""
    params_bytes, cache_bytes = shard_bytes(params), shard_bytes(cache)
    _check(
        mesh,
        params_bytes + cache_bytes,
        f"the KV cache does not fit: {cache_bytes:,} bytes, and {params_bytes:,} of weights",
        "Choose fewer --beam or --samples, a smaller --batch_sequences or --max_tokens, shorter "
        "lines, or more devices.",
    )


def _batch_bytes(run: Run, layout: Layout, mesh: Mesh, rows: int, microbatches: int = 1) -> int:
    sharding = BatchSharding(layout, mesh, rows, microbatches)
    return shard_bytes(sharding.abstract(run.task.array_shapes))


def _check(mesh: Mesh, needed_bytes: int, problem: str, remedy: str) -> None:
    memory_bytes = device_memory_bytes(mesh)
    if memory_bytes is not None and needed_bytes > memory_bytes:
        raise UserError(f"{problem} on each device, which has {memory_bytes:,}.  {remedy}")


def shard_bytes(tree: Any) -> int:
    """Returns the bytes of arrays on one device."""
    leaves = jax.tree.leaves(tree)
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves)


def device_memory_bytes(mesh: Mesh) -> int | None:
    """Returns the memory of a device; virtual devices of a CPU share the machine's memory."""
    local = mesh.local_devices
    limit = (local[0].memory_stats() or {}).get("bytes_limit")
    if limit is None and local[0].platform == "cpu":
        limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // len(local)
    return limit
