"""Layouts that pad do not change the result: training, checkpoints, scores and decoding.

Nothing here divides: batch, heads, vocabularies, experts and groups of tokens.
"""

import dataclasses
import functools
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding

from layouts.layout import Layout
from layouts.mesh import make_mesh
from models.adapters.lora import Lora
from models.attention.multi_head import MultiHead
from models.decoding.generate import DecodeInputs, generate
from models.decoding.sampling import Sampling
from models.feed_forward.mlp import Mlp
from models.feed_forward.moe.layer import Moe
from models.feed_forward.moe.routing import Top2
from models.loss import Criterion
from models.norms import LayerNorm
from models.parts import Block
from models.transformer import TransformerModel
from tests.toys import FLOAT64, ROUND_OFF, WHOLE, pair_rows, toy
from tests.trainer.test_layout_sweep import by_path
from trainer.checkpoints.manager import Checkpoints
from trainer.checkpoints.restore import StatePadding
from trainer.decoding.score import token_losses
from trainer.feed import BatchSharding
from trainer.optimizers.adafactor import Adafactor
from trainer.optimizers.adamw import AdamW
from trainer.optimizers.muon import Muon
from trainer.optimizers.schedules import Constant
from trainer.step import State, TrainStepSpec, train_step

pytestmark = pytest.mark.usefixtures("float64")
STEPS = 3
RATE = Constant(peak=3e-3, warmup_steps=2)
ROUTER = Top2(jitter=0.1, z_loss=1e-3, capacity_factor=0.75, least_capacity=1)


class Case(NamedTuple):
    """A program and how it is split; all sizes by what they are held as."""

    program: TrainStepSpec
    rows: int  # of a microbatch
    padded: Layout
    padded_sizes: dict[int, int]
    lengths: tuple[int, int] = (8, 6)  # of rows and of their sources


# 3 key/value heads of 2 queries, experts with drops, groups of three rows, two microbatches.
EXPERTS = Case(
    TrainStepSpec(
        TransformerModel(
            toy(layers=1, vocab=23, dropout=0.1, attention=MultiHead(dropout=0.2),
                precision=FLOAT64,
                feed_forward=Moe(experts=6, d_ff=12, router=ROUTER, group_tokens=24)),
            WHOLE,
        ),
        Adafactor(schedule=RATE, clip_global_norm=0.5, factored_from=3),
        Criterion(label_smoothing=0.1, z_loss=1e-3), STEPS, 5, microbatches=2,
    ),
    6,
    Layout(mesh="data:4,model:2", rules="batch:data+;heads:model+;vocab:model+;experts:data+"),
    {3: 4, 23: 24, 6: 8},
)  # fmt: skip
# One matrix for both vocabularies, weights that are split twice.
DENSE = Case(
    TrainStepSpec(
        TransformerModel(toy(layers=1, precision=FLOAT64), WHOLE),
        AdamW(schedule=RATE, clip_global_norm=0.5),
        Criterion(label_smoothing=0.1), STEPS, 5,
    ),
    5,
    Layout(mesh="data:2,model:4", rules="batch:data+;kv_heads:model+;vocab:model+",
           param_rules="d_model:data"),
    {3: 4, 22: 24},
)  # fmt: skip
# Where weights are stored the heads are padded, and where they are used another rule splits them.
STORED = DENSE._replace(
    padded=Layout(mesh="x:4,y:2", rules="heads:x", param_rules="kv_heads:y+"), padded_sizes={3: 4}
)
# Feed-forward layers of 14, experts of 10 and a layer for all tokens of 7, all with dropout.
HIDDEN = Case(
    TrainStepSpec(
        TransformerModel(
            toy(
                dropout=0.1, precision=FLOAT64,
                pattern=(
                    Block(
                        feed_forward=Mlp(gated=True, activation="gelu", biases=True),
                        norm=LayerNorm(),
                    ),
                    Block(feed_forward=Moe(experts=5, d_ff=10, shared_d_ff=7, dispatch="dropless")),
                ),
            ),
            WHOLE,
        ),
        Muon(schedule=RATE, clip_global_norm=0.5),
        Criterion(), STEPS, 5,
    ),
    4,
    Layout(mesh="data:2,model:4", rules="batch:data;experts:data+;d_ff:model+"),
    {14: 16, 10: 12, 7: 8, 5: 6},
)  # fmt: skip


# Rows of 9 tokens over 4 devices, and groups of 6 of their tokens.
LENGTH = EXPERTS._replace(
    padded=Layout(mesh="data:2,x:4", rules="batch:data+;length:x+;memory:x+"),
    padded_sizes={}, lengths=(9, 6),
)  # fmt: skip
# Rows and sources of other lengths, with dropout of logits, and slices of the loss.
PAIRS = Case(
    TrainStepSpec(
        TransformerModel(
            toy(layers=1, encoder_layers=2, length=10, vocab=23, dropout=0.1, loss_chunks=3,
                attention=MultiHead(dropout=0.2), precision=FLOAT64,
                feed_forward=Moe(experts=4, d_ff=12, router=ROUTER)),
            WHOLE,
        ),
        Adafactor(schedule=RATE, clip_global_norm=0.5, factored_from=3),
        Criterion(r_drop=0.5), STEPS, 5, microbatches=2,
    ),
    6,
    Layout(mesh="data:2,x:4", rules="batch:data+;length:x+;experts:x", param_rules="length:x+"),
    {10: 12}, lengths=(9, 6),
)  # fmt: skip


def adapted(case: Case) -> Case:
    """The same, where two microbatches train adapters."""
    adapter = Lora(rank=5, targets=("*",), store="float64")
    assert isinstance(case.program.model, TransformerModel)
    spec = dataclasses.replace(case.program.model.spec, adapter=adapter)
    program = dataclasses.replace(
        case.program, model=TransformerModel(spec, WHOLE), optimizer=DENSE.program.optimizer,
        microbatches=2,
    )  # fmt: skip
    return case._replace(program=program)


CASES = {
    "experts": EXPERTS, "dense": DENSE, "stored": STORED, "hidden": HIDDEN,
    "adapters, dropless": adapted(HIDDEN), "length": LENGTH, "pairs": PAIRS,
}  # fmt: skip


class Trained(NamedTuple):
    """What some steps left."""

    disk: StatePadding
    metrics: np.ndarray
    state: State
    saved: dict[str, np.ndarray]


def under(layout: Layout, program: TrainStepSpec) -> StatePadding:
    assert isinstance(program.model, TransformerModel)
    program_here = dataclasses.replace(program, model=TransformerModel(program.model.spec, layout))
    return StatePadding(program_here, make_mesh(layout))


def batch(case: Case, step: int) -> dict[str, np.ndarray]:
    rng, rows = np.random.default_rng(step), case.rows * case.program.microbatches
    lengths = (rng.integers(1, high, (rows, 2)).tolist() for high in (5, 4))
    length, source_length = case.lengths
    return pair_rows(*lengths, length, 22, seed=step, source_length=source_length)


@functools.cache
def trained(name: str, *, padded: bool) -> Trained:
    case = CASES[name]
    disk = under(case.padded if padded else WHOLE, case.program)
    rows_in_all = case.rows * case.program.microbatches
    sharding = BatchSharding(
        disk.step_spec.model.layout, disk.mesh, rows_in_all, case.program.microbatches
    )
    rng = np.random.default_rng(1)

    def number(path: str, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        drawn = rng.normal("scale" in path, 0.25, leaf.shape) * path.startswith("params")
        return jax.device_put(np.asarray(drawn, leaf.dtype), leaf.sharding)

    first = [number(path, leaf) for path, leaf in by_path(disk.unpadded).items()]
    state = disk.pad(jax.tree.unflatten(jax.tree.structure(disk.unpadded), first))
    metrics = []
    with jax.set_mesh(disk.mesh):
        for step in range(STEPS):
            rows = sharding.to_global_arrays(batch(case, step))
            state, computed = train_step(disk.step_spec, state, rows)
            metrics.append([float(computed[key]) for key in ("loss", "grad_norm", "tokens")])
    saved = by_path(jax.device_get(disk.unpad(state)))
    return Trained(disk, np.array(metrics), state, saved)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", CASES)
def test_training_is_that_of_one_device(name: str) -> None:
    computed, expected = trained(name, padded=True), trained(name, padded=False)
    np.testing.assert_allclose(computed.metrics, expected.metrics, rtol=ROUND_OFF)
    for path, array in expected.saved.items():
        is_weight, largest = path.startswith("params"), np.abs(array).max()
        limit = ROUND_OFF if is_weight else ROUND_OFF * largest
        np.testing.assert_allclose(computed.saved[path], array, rtol=0, atol=limit, err_msg=path)


@pytest.mark.few(2)
@pytest.mark.parametrize("name", CASES)
def test_what_is_held_is_padded_split_and_zero_behind(name: str) -> None:
    computed, padded_sizes = trained(name, padded=True), CASES[name].padded_sizes
    sizes = set()
    for path, array in by_path(computed.state["params"]).items():
        true = computed.saved[f"params/{path}"].shape
        sizes |= {(a, b) for a, b in zip(true, array.shape, strict=True) if a != b}
        behind = np.array(array)
        behind[tuple(map(slice, true))] = 0
        assert not behind.any(), path
        assert array.shape == true or not array.sharding.is_fully_replicated, path
    assert dict(sizes) == padded_sizes


def test_a_batch_that_does_not_divide_is_read_whole_by_every_host() -> None:
    for rows, last in ((6, 6), (8, 8)):
        sharding = BatchSharding(EXPERTS.padded, make_mesh(EXPERTS.padded), rows)
        assert sharding.host_rows() == (0, last)
        placed = sharding.to_global_arrays({"inputs_BL": np.zeros((rows, 8), np.int32)})
        assert placed["inputs_BL"].sharding.is_fully_replicated == (rows == 6)


def test_checkpoints_have_true_sizes_and_are_restored_under_any_layout(tmp_path: Path) -> None:
    computed = trained("experts", padded=True)
    other = under(
        Layout(mesh="data:2,model:4", rules="batch:data+;vocab:model+;experts:model+"),
        EXPERTS.program,
    )
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(STEPS, computed.disk.unpad(computed.state))
        checkpoints.wait()
        shapes = {path: array.shape for path, array in checkpoints.describe(STEPS).items()}
        restored = other.pad(checkpoints.restore(other.unpadded)[0])
    expected = by_path(trained("experts", padded=False).state)
    assert shapes == {path: array.shape for path, array in expected.items()}
    assert restored["params"]["embed_VD"].shape == (24, 10)
    assert by_path(restored)["params/decoder/layers_N/mlp/wi_EDF"].shape == (1, 8, 10, 12)
    for path, array in by_path(jax.device_get(other.unpad(restored))).items():
        np.testing.assert_array_equal(array, computed.saved[path], err_msg=path)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["dense", "length"])
def test_scores_and_samples_are_those_of_one_device(name: str) -> None:
    """Of the weights that one device trained, under either layout."""

    case = CASES[name]

    def made(padded: bool) -> tuple[Any, ...]:
        disk = trained(name, padded=padded).disk
        model = disk.step_spec.model
        sharding = BatchSharding(model.layout, disk.mesh, case.rows)

        def put(array: np.ndarray, axes: str) -> jax.Array:
            return jax.device_put(array, NamedSharding(disk.mesh, model.layout.place(axes)))

        saved, expected = trained(name, padded=False).state["params"], disk.unpadded["params"]
        params = jax.tree.map(
            lambda x, like: jax.device_put(np.array(x), like.sharding), saved, expected
        )
        params = disk.pad({"params": params})["params"]
        with jax.set_mesh(disk.mesh):
            rows = sharding.to_global_arrays(
                {of: rows[: case.rows] for of, rows in batch(case, 9).items()}
            )
            losses_BL = np.asarray(token_losses(model, params, rows).loss_BL)
            requested = DecodeInputs(
                prompts_BL=put(np.zeros((4, 0), np.int32), "Bl"),
                prompt_lengths_B=put(np.zeros(4, np.int32), "B"),
                seeds_B=put(np.arange(4, dtype=np.uint32), "B"),
                max_new_tokens_B=put(np.full(4, 4, np.int32), "B"),
            )
            texts = generate(model, Sampling(width=2), 4, params, requested)
        return losses_BL, *map(np.asarray, texts)

    computed, expected = made(True), made(False)
    assert computed[0].shape == (case.rows, case.lengths[0]) and np.count_nonzero(computed[0])
    np.testing.assert_array_equal(computed[1], expected[1])
    assert len(np.unique(computed[1])) > 5
    for value, other in zip(computed[::2], expected[::2], strict=True):
        np.testing.assert_allclose(value, other, rtol=ROUND_OFF)
