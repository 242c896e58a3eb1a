"""Sigmoid gates, the bias of experts that balances them without a loss, and shared experts."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs.errors import UserError
from layouts.layout import Layout
from layouts.mesh import make_mesh
from models.attention.multi_head import MultiHead
from models.feed_forward.mlp import Mlp
from models.feed_forward.moe.layer import Moe
from models.feed_forward.moe.routing import SigmoidTopK
from models.loss import Criterion
from models.parts import Block
from models.precision import FloatType, Precision
from models.transformer import Transformer
from tests.toys import FLOAT64, ROUND_OFF, SPLITTABLE, WHOLE, on_mesh, optax_promotion, packed_rows
from trainer.optimizers.adamw import AdamW
from trainer.optimizers.schedules import Constant
from trainer.step import TrainStepSpec, init_state, train_step

pytestmark = pytest.mark.usefixtures("float64")
ROUTER = SigmoidTopK(k=2, scale=2.5, bias_rate=0.01)
MOE = Moe(
    experts=6, d_ff=24, shared_d_ff=8, router=ROUTER, expert=Mlp(gated=True, activation="gelu")
)
SPEC = dataclasses.replace(
    SPLITTABLE,
    layers=2,
    dropout=0.0,
    attention=MultiHead(),
    pattern=(Block(), Block(feed_forward=MOE)),
    precision=FLOAT64,
)
ROWS = packed_rows([[9, 11]] * 8, 24, 64)


def test_gates_are_sigmoids_and_the_bias_changes_the_choice_alone() -> None:
    rng = np.random.default_rng(0)
    logits_SE, bias_E = rng.normal(size=(9, 5)), rng.normal(size=5)
    with jax.set_mesh(make_mesh(WHOLE)):
        gates_Gse = ROUTER.gates(jnp.asarray(logits_SE)[None])
        segments_Gs = jnp.ones((1, 9), jnp.int32)
        routing = ROUTER.route(WHOLE, gates_Gse, segments_Gs, None, None, jnp.asarray(bias_E))
    sigmoid_SE = 1 / (1 + np.exp(-logits_SE))
    unbiased = 0
    for s, gates_E in enumerate(sigmoid_SE):
        best = np.argsort(-(gates_E + bias_E))[:2]
        unbiased += set(best) == set(np.argsort(-gates_E)[:2])
        assert np.asarray(routing.expert_Gsi)[0, s].tolist() == best.tolist()
        expected = 2.5 * gates_E[best] / gates_E[best].sum()
        np.testing.assert_allclose(routing.gate_Gsi[0, s], expected, rtol=1e-5)
    assert unbiased < 9


def test_the_experts_of_a_token_are_in_few_groups() -> None:
    """DeepSeek-AI 2024 (DeepSeek-V3), section 2.1.2, one token after another."""
    router = dataclasses.replace(ROUTER, k=3, expert_groups=4, groups_per_token=2)
    rng = np.random.default_rng(1)
    gates_SE, bias_E = rng.uniform(size=(40, 12)), rng.normal(size=12)
    with jax.set_mesh(make_mesh(WHOLE)):
        _, expert_Gsi = router.choose(WHOLE, jnp.asarray(gates_SE)[None], jnp.asarray(bias_E))
    free = 0
    for gates_E, chosen in zip(gates_SE, np.asarray(expert_Gsi)[0], strict=True):
        biased = gates_E + bias_E
        score = [sum(sorted(biased[i : i + 3])[1:]) for i in range(0, 12, 3)]
        groups = np.argsort(score)[2:]
        allowed = [e for e in range(12) if e // 3 in groups]
        assert chosen.tolist() == sorted(allowed, key=lambda e: -biased[e])[:3]
        free += set(chosen) == set(np.argsort(-biased)[:3])
    assert free < 40


@pytest.mark.parametrize(("groups", "best"), [(5, 1), (12, 3), (6, 1), (2, 3)])
def test_groups_that_do_not_fit_are_refused(groups: int, best: int) -> None:
    words = f"SigmoidTopK.expert_groups = {groups}, groups_per_token = {best}: found k = 3 and Moe"
    with pytest.raises(UserError, match=re.escape(words)):
        Moe(experts=12, router=SigmoidTopK(k=3, expert_groups=groups, groups_per_token=best))


def trained(layout: Layout, spec: Transformer, microbatches: int = 1, steps: int = 3):
    """The weights after some steps, without padding, and the loads of each."""
    program = TrainStepSpec(
        model=spec.model(layout),
        optimizer=AdamW(schedule=Constant(peak=1e-3), epsilon=1e-4),
        criterion=Criterion(),
        steps=steps,
        seed=0,
        microbatches=microbatches,
    )
    mesh, batch = on_mesh(layout, ROWS)
    if microbatches > 1:
        batch = {
            name: jnp.stack(jnp.split(jax.device_get(x), microbatches)) for name, x in batch.items()
        }
    with jax.set_mesh(mesh), optax_promotion():
        loads, state = [], init_state(program, mesh)
        infos = program.model.weights()
        for _ in range(steps):
            state, metrics = train_step(program, state, batch)
            loads.append(jax.device_get(metrics["loads"]["decoder"]["layers_N/block1"].kept_e[0]))
    leaves = jax.tree_util.tree_leaves_with_path(state["params"])
    by_path = {jax.tree_util.keystr(p, simple=True, separator="/"): x for p, x in leaves}
    return {p: np.asarray(x)[tuple(map(slice, infos[p].shape))] for p, x in by_path.items()}, loads


@functools.cache
def of_one_device(spec: Transformer) -> dict[str, np.ndarray]:
    return trained(WHOLE, spec)[0]


BIAS = "decoder/layers_N/block1/mlp/bias_E"


@pytest.mark.few(1)
@pytest.mark.parametrize("store", ["float32", "bfloat16"])
def test_a_step_moves_each_bias_towards_an_even_load(store: FloatType) -> None:
    spec = dataclasses.replace(SPEC, precision=Precision(store=store))
    weights, loads = trained(WHOLE, spec, steps=2)
    moves = sum(0.01 * np.sign(load.mean() - load) for load in loads)
    np.testing.assert_allclose(weights[BIAS][0], moves, atol=1e-9)  # 0.01 in float32
    assert np.abs(weights[BIAS]).max() > 0


@pytest.mark.long
@pytest.mark.parametrize(
    ("dispatch", "layout", "microbatches"),
    [
        (
            "gather",
            Layout(mesh="data:2,model:2", rules="batch:data;experts:data;d_ff:model;heads:model"),
            2,
        ),
        ("dropless", Layout(mesh="data:4", rules="batch:data;experts:data+"), 1),
    ],
    ids=["experts and model, microbatches", "padded experts"],
)
def test_no_layout_changes_weights_or_biases(
    dispatch: str, layout: Layout, microbatches: int
) -> None:
    moe = dataclasses.replace(MOE, dispatch=dispatch)
    spec = dataclasses.replace(
        SPEC,
        precision=FLOAT64,
        pattern=(Block(), Block(feed_forward=moe)),
        attention=SPEC.attention,
    )
    spec = dataclasses.replace(spec, attention=dataclasses.replace(spec.attention, dropout=0.0))
    one, (many, _) = of_one_device(spec), trained(layout, spec, microbatches)
    assert BIAS in one
    for path, expected in one.items():
        np.testing.assert_allclose(many[path], expected, atol=ROUND_OFF, err_msg=path)


def test_biases_even_out_a_skewed_load() -> None:
    """Tokens that all prefer the first experts spread over all of them."""
    rng = np.random.default_rng(0)
    logits_Gse = jnp.asarray(rng.normal(size=(1, 64, 6)) + np.linspace(2, 0, 6))
    segments_Gs, bias_e, worst = jnp.ones((1, 64), jnp.int32), jnp.zeros(6), []
    router = dataclasses.replace(ROUTER, bias_rate=0.02)

    @jax.jit
    def step(bias_e: jax.Array) -> tuple[jax.Array, jax.Array]:
        gates_Gse = router.gates(logits_Gse)
        routing = router.route(WHOLE, gates_Gse, segments_Gs, None, None, bias_e)
        load_e = jnp.bincount(routing.expert_Gsi.ravel(), length=6).astype(float)
        return router.updated_bias(bias_e, load_e), load_e

    with jax.set_mesh(make_mesh(WHOLE)):
        for _ in range(60):
            bias_e, load_e = step(bias_e)
            worst.append(float(load_e.max() / load_e.mean()))
    assert worst[0] > 1.5 and np.mean(worst[-10:]) < 1.2


def test_all_tokens_go_through_the_shared_layer() -> None:
    with jax.set_mesh(make_mesh(WHOLE)):
        model = SPEC.model(WHOLE)
        params = model.init(jax.random.key(0))
        batch = {name: jnp.asarray(rows) for name, rows in ROWS.items()}
        losses = jax.jit(model.token_losses)(params, batch).loss_BL
        mlp = params["decoder"]["layers_N"]["block1"]["mlp"]
        assert mlp["shared"]["wi_DF"].shape == (1, 16, 8)
        mlp["shared"]["wo_FD"] = jnp.zeros_like(mlp["shared"]["wo_FD"])
        without = jax.jit(model.token_losses)(params, batch).loss_BL
    changed = np.asarray(losses != without)
    assert changed[np.asarray(ROWS["segments_BL"]) > 0].all()
