"""Compares gradients of tiny models on a run's devices with gradients on a CPU.

A compiler bug with a layout gives wrong numbers without an error: in openxla/xla issue 49143, the
gradient of an embedding is wrong if its vocabulary is split like the batch.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from configs.errors import UserError
from data.packing import rows as packing
from layouts.axes import leaf_path
from layouts.layout import Layout, parse_rules
from layouts.mesh import make_mesh, mesh_of_devices
from layouts.shards import num_shards
from models.feed_forward.moe.layer import Moe
from models.feed_forward.moe.routing import Top2
from models.loss import CROSS_ENTROPY
from models.parts import Block
from models.transformer import Transformer
from trainer.feed import BatchSharding
from trainer.optimizers.adamw import AdamW
from trainer.step import TrainStepSpec, abstract_params, add_microbatches

MICROBATCHES = 4
Rows = dict[str, np.ndarray]
TOLERANCE = 1e-3
"""Largest relative difference that passes: float32 round-off is about 1e-6 here."""
WHOLE = Layout(mesh="data:1", rules="")


class Comparison(NamedTuple):
    """Holds the difference between a model's gradients on devices and on a CPU."""

    model: str
    where: str
    difference: float = 0.0
    """The largest of any weight, relative to the largest gradient of that weight."""
    weight: str = ""
    refusal: str = ""
    """Why the layout cannot run the model."""

    @property
    def is_equal(self) -> bool:
        return not self.refusal and self.difference <= TOLERANCE  # False for nan


def compare_with_cpu(layout: Layout) -> Iterator[Comparison]:
    """Compares gradients on one device, and under the layout in one and in several microbatches.

    Every process of a run calls it.  Raises UserError if a rule names an axis that the mesh lacks.
    """
    mesh = make_mesh(layout)
    rules = (*parse_rules(layout.rules), *parse_rules(layout.param_rules))
    for rule in rules:
        if rule.mesh_axis not in mesh.shape:
            raise UserError(
                f"rule {rule}: no such mesh axis: {rule.mesh_axis}.  "
                f"Legal: {', '.join(mesh.shape)}."
            )
    alone = mesh_of_devices(jax.local_devices()[:1], {"data": 1}, None)
    cpu = mesh_of_devices(jax.local_devices(backend="cpu")[:1], {"data": 1}, None)
    cases = [
        ("one device", WHOLE, alone, 1),
        (f"{mesh.size} devices", layout, mesh, 1),
        (f"{mesh.size} devices, {MICROBATCHES} microbatches", layout, mesh, MICROBATCHES),
    ]
    for name, spec, batch in tiny_models(layout, mesh):
        with jax.set_mesh(cpu):
            params = jax.device_get(jax.jit(spec.model(WHOLE).init)(jax.random.key(0)))
        expected = gradients(spec, WHOLE, cpu, params, batch, 1)
        for where, chosen, devices, count in cases[alone == cpu :]:
            try:
                computed = gradients(spec, chosen, devices, params, batch, count)
            except UserError as error:
                yield Comparison(name, where, refusal=str(error))
            else:
                yield Comparison(name, where, *largest_difference(computed, expected))


def tiny_models(layout: Layout, mesh: Mesh) -> Iterator[tuple[str, Transformer, Rows]]:
    """Yields models and batches whose sizes are divisible under the layout."""
    with jax.set_mesh(mesh):
        shards = {
            axis: math.lcm(*(num_shards(layout.place(axis, stored=s)[0]) for s in (False, True)))
            for axis in "BGVDFJQKLMEN"
        }
    length = 16 * math.lcm(shards["L"], shards["M"])
    rows = 2 * MICROBATCHES * math.lcm(shards["B"], shards["G"])
    kv_heads, vocab = 2 * shards["J"], 32 * shards["V"]
    dense = Transformer(
        vocab=vocab,
        d_model=16 * shards["D"],
        d_ff=24 * shards["F"],
        kv_heads=kv_heads,
        heads=2 * kv_heads * shards["Q"],
        d_kv=8 * shards["K"],
        layers=2 * shards["N"] * layout.pipeline_repeats,
        length=length,
    )
    moe = Moe(experts=4 * shards["E"], router=Top2(random_second=False))
    pattern = (Block(), Block(feed_forward=moe))
    sparse = dataclasses.replace(dense, layers=2 * dense.layers, pattern=pattern)
    targets = packed_rows(rows, length, vocab, seed=0)
    sources = packed_rows(rows, length, vocab, seed=1)
    of_source = ("inputs", "segments", "positions")
    pairs = targets | {f"{name}_BM": sources[f"{name}_BL"] for name in of_source}
    yield "dense", dense, targets
    yield "experts", sparse, targets
    yield "encoder-decoder", dataclasses.replace(dense, encoder_layers=dense.layers), pairs


def packed_rows(rows: int, length: int, vocab: int, seed: int) -> Rows:
    """Makes rows of two segments and padding, whose lengths differ between rows."""
    rng = np.random.default_rng(seed)
    tokens_BL = rng.integers(2, vocab, (rows, length), dtype=np.int32)
    column_L = np.arange(length)
    first_B1, end_B1 = (rng.integers(*ends, (rows, 1)) for ends in ((2, 8), (9, length + 1)))
    segments_BL = np.where(column_L < first_B1, 1, np.where(column_L < end_B1, 2, 0))
    arrays = {"targets": np.where(segments_BL > 0, tokens_BL, 0), "segments": segments_BL}
    return packing.Rows(arrays, packing.Counts()).batch(np.arange(rows))


def gradients(
    spec: Transformer, layout: Layout, mesh: Mesh, params: Any, batch: Rows, microbatches: int
) -> Any:
    """Returns the unsharded gradients of a batch under a layout."""
    model = spec.model(layout)
    step_spec = TrainStepSpec(model, AdamW(), CROSS_ENTROPY, 1, 0, microbatches)
    sharding = BatchSharding(layout, mesh, len(batch["targets_BL"]), microbatches)
    host_rows = slice(*sharding.host_rows())
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_params(model, mesh))
    params = jax.device_put(params, shardings)
    arrays = sharding.to_global_arrays({name: rows[host_rows] for name, rows in batch.items()})

    def summed(params: Any, batch: dict[str, jax.Array]) -> Any:
        sums, _ = add_microbatches(step_spec, params, batch, jax.random.key(0))
        return jax.tree.map(lambda x: jax.sharding.reshard(x, jax.P()), sums)

    with jax.set_mesh(mesh), jax.default_matmul_precision("highest"):
        sums = jax.jit(summed)(params, arrays)
    return jax.tree.map(lambda x: np.asarray(x.addressable_data(0)), sums)


def largest_difference(computed: Any, expected: Any) -> tuple[float, str]:
    """Returns the largest relative difference of a weight, and the weight's path."""

    def difference(path: Any, x: np.ndarray, y: np.ndarray) -> tuple[float, str]:
        relative = float(np.abs(x - y).max() / max(np.abs(y).max(), 1e-30))
        return (math.inf if math.isnan(relative) else relative), leaf_path(path)

    pairs = jax.tree.map_with_path(difference, computed, expected)
    return max(jax.tree.leaves(pairs, is_leaf=lambda pair: isinstance(pair, tuple)))
