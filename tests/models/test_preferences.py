"""The loss of preferences is that of Rafailov et al. 2023, under every kind of layout."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layouts.layout import Layout
from layouts.mesh import make_mesh
from models.api import Batch, Params
from models.attention.multi_head import MultiHead
from models.distillation import TEACHER, DistilledModel
from models.loss import Criterion
from models.transformer import Transformer, TransformerModel
from tests.toys import FLOAT64, ROUND_OFF, SPLITTABLE, WHOLE, packed_rows
from tests.trainer.conftest import optax_types  # noqa: F401
from tests.trainer.test_layout_sweep import by_path, first_state
from trainer.checkpoints.restore import StatePadding
from trainer.feed import BatchSharding
from trainer.optimizers.adamw import AdamW
from trainer.step import TrainStepSpec, add_microbatches

POLICY = dataclasses.replace(
    SPLITTABLE, vocab=62, layers=2, scan=True, precision=FLOAT64, dropout=0.0, logit_cap=5.0,
    attention=MultiHead(),
)  # fmt: skip
REFERENCE = dataclasses.replace(POLICY, layers=1, d_model=24, heads=4, d_ff=32, logit_cap=3.0)
BETA = 0.7
CRITERION = Criterion(dpo_beta=BETA)
SEGMENTS = [[9, 12], [6, 18], [5, 6, 7, 2], [10, 10]] * 2
LENGTH = 26
ROWS = packed_rows(SEGMENTS, LENGTH, 62) | {
    "loss_mask_BL": np.random.default_rng(1)
    .integers(0, 2, (len(SEGMENTS), LENGTH))
    .astype(np.int32)
}
LAYOUTS = {
    "fsdp": Layout(mesh="data:4", rules="batch:data", param_rules="d_model:data"),
    "length": Layout(mesh="data:2,model:4", rules="batch:data;length:model+"),
    "uneven vocabulary": Layout(mesh="data:2,model:4", rules="batch:data;vocab:model+;d_ff:model"),
    "stages": Layout(mesh="pipe:2,data:2", rules="layers:pipe;batch:data"),
}

pytestmark = pytest.mark.usefixtures("float64")


def computed(layout: Layout) -> tuple[dict[str, float], dict[str, np.ndarray], Params]:
    """Returns the sums over a batch, the gradients, and the weights, the same everywhere."""
    model = DistilledModel(POLICY, layout, REFERENCE)
    program, mesh = (
        TrainStepSpec(model, AdamW(), CRITERION, 9, 5, microbatches=2),
        make_mesh(layout),
    )
    padding = StatePadding(program, mesh)
    params = first_state(program.without_padding(), mesh)["params"]
    with jax.set_mesh(mesh):
        batch = BatchSharding(layout, mesh, len(SEGMENTS), 2).to_global_arrays(ROWS)
        gradients, sums = jax.jit(functools.partial(add_microbatches, program))(
            padding.pad({"params": params})["params"], batch, jax.random.key(7)
        )
        gradients = padding.unpad({"params": gradients})["params"]
    numbers = {name: float(getattr(sums, name)) for name in ("objective", "correct", "tokens")}
    return numbers, by_path(jax.device_get(gradients)), jax.device_get(params)


@functools.cache
def of_one_device() -> tuple[dict[str, float], dict[str, np.ndarray], Params]:
    return computed(WHOLE)


@functools.partial(jax.jit, static_argnums=0)
def losses(model: TransformerModel, params: Params, batch: Batch) -> jax.Array:
    return jnp.sum(model.token_losses(params, batch).loss_BL, axis=1)


def log_p_of_answers(spec: Transformer, params: Params) -> np.ndarray:
    """The log-probability of the counted tokens of each segment, each in a row of its own."""
    alone = {name: [] for name in ROWS}
    for row, lengths in enumerate(SEGMENTS):
        for start, size in zip(np.cumsum([0, *lengths]), lengths, strict=False):
            for name, rows in ROWS.items():
                alone[name].append(np.pad(rows[row, start : start + size], (0, LENGTH - size)))
    with jax.set_mesh(make_mesh(WHOLE)):
        batch = {name: jnp.asarray(np.stack(rows)) for name, rows in alone.items()}
        return -np.asarray(losses(TransformerModel(spec, WHOLE), params, batch))


def dpo(params: Params) -> tuple[float, int]:
    """Equation 7, and how many margins are positive."""
    policy = {name: tree for name, tree in params.items() if name != TEACHER}
    gains = log_p_of_answers(POLICY, policy) - log_p_of_answers(REFERENCE, params[TEACHER])
    margins = gains[::2] - gains[1::2]
    return float(np.log1p(np.exp(-BETA * margins)).sum()), int((margins > 0).sum())


def test_it_is_the_loss_of_the_paper() -> None:
    numbers, gradients, params = of_one_device()
    loss, positive = dpo(params)
    pairs = sum(len(lengths) for lengths in SEGMENTS) // 2
    assert numbers["objective"] == pytest.approx(loss, rel=1e-9)
    assert (numbers["correct"], numbers["tokens"]) == (positive, pairs)
    assert 0 < positive < pairs
    # Along a random direction, the loss grows as the gradients say.
    rng, step = np.random.default_rng(3), 1e-6  # few ReLUs flip
    weights = {name: tree for name, tree in params.items() if name != TEACHER}
    direction = jax.tree.map(lambda x: rng.normal(0, 1, x.shape), weights)
    up, down = (
        dpo(params | jax.tree.map(lambda x, d, s=s: x + s * d, weights, direction))[0]
        for s in (step, -step)
    )
    slope = sum(np.vdot(gradients[path], d) for path, d in by_path(direction).items())
    assert slope == pytest.approx((up - down) / (2 * step), rel=1e-6)


@pytest.mark.few(2)
@pytest.mark.parametrize("name", LAYOUTS)
def test_no_layout_changes_it(name: str) -> None:
    (numbers, gradients, _), (expected, of_one, _) = computed(LAYOUTS[name]), of_one_device()
    assert numbers == pytest.approx(expected, rel=ROUND_OFF)
    assert gradients.keys() == of_one.keys() and not any("teacher" in path for path in gradients)
    for path, gradient in of_one.items():
        np.testing.assert_allclose(gradients[path], gradient, atol=ROUND_OFF, rtol=0, err_msg=path)
