"""Defines toy models and batches.  All their sizes differ, so that swapped axes fail a test."""

import contextlib
import dataclasses
import pathlib
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding

from configs import imports
from data.mixture import shuffled
from layouts.axes import letters_of
from layouts.layout import Layout
from layouts.mesh import make_mesh
from models.api import Batch
from models.attention.multi_head import MultiHead
from models.parts import Block, Part
from models.precision import Precision
from models.transformer import Transformer

ROOT = pathlib.Path(__file__).parent.parent


def example(name: str) -> ModuleType:
    """Imports a module of docs/examples, as a run file does."""
    imports.allow_folder(ROOT / "docs" / "examples")
    imports.import_module(name)
    return sys.modules[name]


def row_ids(seed: int, step: int, batch_sequences: int, rows: int) -> np.ndarray:
    """Returns the row ids of a step's batch, from the endless shuffle of a single text."""
    places = np.arange(step * batch_sequences, (step + 1) * batch_sequences)
    return shuffled(seed, places, rows)


def ignoring(signals: str) -> list[str]:
    """Returns the start of a command that ignores signals, such as "HUP" under nohup."""
    return ["sh", "-c", f'trap "" {signals}; exec "$@"', "sh"] if signals else []


WHOLE = Layout(mesh="data:1", rules="")
# Equal runs differ by 1e-13 in float64, on any processor.  In float32, round-off grows to 1e-6 in
# a few steps, depending on the processor, and could hide a small fault.
with jax.enable_x64(True):
    FLOAT64 = Precision(store="float64", compute="float64")
ROUND_OFF = 1e-9
TOY = Transformer(
    vocab=22, layers=2, d_model=10, d_ff=14, heads=6, kv_heads=3, d_kv=4, length=8, scan=False
)
# All sizes differ, and every shipped layout can split them over eight devices; but not layers,
# which only one of the layouts splits, into stages.
SPLITTABLE = Transformer(
    vocab=64, layers=3, d_model=16, d_ff=40, heads=8, d_kv=6, length=24, dropout=0.1,
    attention=MultiHead(dropout=0.2), scan=False,
)  # fmt: skip


def toy(**changes: Any) -> Transformer:
    return dataclasses.replace(TOY, **changes)


def with_parts(spec: Transformer, change: Callable[[Part], Part]) -> Transformer:
    """Changes the parts of a model, and the parts of each of its blocks."""

    def changed(spec: Any) -> Any:
        values = {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)}
        for name, value in values.items():
            if isinstance(value, Part):
                values[name] = change(value)
            elif isinstance(value, tuple):
                values[name] = tuple(
                    changed(item) if isinstance(item, Block) else item for item in value
                )
        return dataclasses.replace(spec, **values)

    return changed(spec)


def packed_rows(segment_lengths: list[list[int]], length: int, vocab: int, seed: int = 0) -> Batch:
    """Returns rows of random targets in segments of these lengths, packed like real data."""
    rng = np.random.default_rng(seed)
    rows = len(segment_lengths)
    batch = {
        name: np.zeros((rows, length), np.int32)
        for name in ("inputs_BL", "targets_BL", "segments_BL", "positions_BL")
    }
    for row, lengths in enumerate(segment_lengths):
        start = 0
        for segment, size in enumerate(lengths, 1):
            here = (row, slice(start, start + size))
            batch["targets_BL"][here] = rng.integers(2, vocab, size)
            batch["inputs_BL"][row, start + 1 : start + size] = batch["targets_BL"][here][:-1]
            batch["segments_BL"][here] = segment
            batch["positions_BL"][here] = np.arange(size)
            start += size
    return batch


def pair_rows(
    target_lengths: list[list[int]],
    source_lengths: list[list[int]],
    length: int,
    vocab: int,
    seed: int = 0,
    source_length: int = 6,
) -> Batch:
    """Returns rows of pairs: targets as in `packed_rows`, and sources of these lengths."""
    sources = packed_rows(source_lengths, source_length, vocab, seed + 1)
    return packed_rows(target_lengths, length, vocab, seed) | {
        "inputs_BM": sources["targets_BL"],
        "segments_BM": sources["segments_BL"],
        "positions_BM": sources["positions_BL"],
    }


def on_mesh(layout: Layout, batch: Batch) -> tuple[jax.sharding.Mesh, Batch]:
    """Returns the layout's mesh, and the batch placed on it."""
    mesh = make_mesh(layout)
    return mesh, {
        name: jax.device_put(array, NamedSharding(mesh, layout.place(letters_of(name))))
        for name, array in batch.items()
    }


@contextlib.contextmanager
def optax_promotion() -> Iterator[None]:
    """Allows what optax needs and strict promotion forbids: float decays to int32 step counts."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def absent_mesh(kind: str, platform: str, **sizes: int) -> AbstractMesh:
    """Makes a mesh of devices that this machine does not have."""
    return AbstractMesh(
        tuple(sizes.values()),
        tuple(sizes),
        axis_types=(AxisType.Explicit,) * len(sizes),
        abstract_device=AbstractDevice(device_kind=kind, num_cores=None, platform=platform),
    )
