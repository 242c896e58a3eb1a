"""Laws of layers with experts."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from configs.errors import UserError
from layouts.mesh import make_mesh
from models.feed_forward.mlp import Mlp
from models.feed_forward.moe.grouped_matmul import in_turn
from models.feed_forward.moe.layer import Moe, MoeLayer
from models.feed_forward.moe.routing import Load, Router, Top2, TopK
from models.initializers import Weights
from models.loss import Criterion, LossSums, token_weights
from models.parts import Block
from models.positions.absolute import Sinusoidal
from models.positions.rotary import Rotary
from models.transformer import Transformer
from tests.toys import WHOLE, on_mesh, packed_rows, pair_rows, toy

ROWS = packed_rows([[3, 5], [8], [2, 2, 2], [1, 6]], 8, 22)
PAIR_ROWS = pair_rows([[3, 5], [8], [2, 2, 2], [1, 6]], [[4, 2], [6], [1, 3, 1], [6, 1]], 8, 22)
KEY = jax.random.key(3)


def moe(router: Router, dispatch: str = "einsum", **changes: Any) -> Transformer:
    experts = Moe(experts=5, router=router, dispatch=dispatch, **changes)
    return toy(layers=1, feed_forward=experts, positions=Rotary())


def kind(router: Router) -> str:
    return type(router).__name__


def load_of(sums: LossSums) -> Load:
    """That of the only layer; its fields have a leading axis."""
    return sums.loads["decoder"]["layers_N"]


def trained_on(
    spec: Transformer,
    batch: dict[str, Any] = ROWS,
    key: jax.Array | None = KEY,
    spread: float = 0.0,
) -> tuple[LossSums, Any]:
    """Sums and gradients under random weights; `spread` moves those that begin at 0."""
    model = spec.model(WHOLE)

    def objective(params: Any) -> tuple[jax.Array, LossSums]:
        sums = model.loss(params, batch, Criterion(), key)
        return sums.total_objective(token_weights(batch)), sums

    mesh, batch = on_mesh(WHOLE, batch)
    with jax.set_mesh(mesh):
        params = model.init(jax.random.key(1))
        waves = jax.tree.map(lambda x: np.cos(np.arange(x.size)).reshape(x.shape), params)
        params = jax.tree.map(lambda x, wave: x + np.float32(spread * wave), params, waves)
        gradients, sums = jax.jit(jax.grad(objective, has_aux=True))(params)
    return sums, gradients


def assert_equal(actual: tuple[LossSums, Any], expected: tuple[LossSums, Any]) -> None:
    for value, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        scale = max(float(jnp.abs(other).max()), 1.0)
        np.testing.assert_allclose(value, other, rtol=0, atol=3e-6 * scale)


@pytest.mark.few(2)
@pytest.mark.parametrize("factor", [0.5, 9.0])
@pytest.mark.parametrize("router", [Top2, TopK], ids=lambda router: router.__name__)
def test_ways_to_dispatch_agree(router: type[Router], factor: float) -> None:
    """By index as by product, whether tokens are dropped or not; without drops blocks as well."""
    router_spec = router(capacity_factor=factor, least_capacity=1, z_loss=0.1)
    expected = trained_on(moe(router_spec))
    load = load_of(expected[0])
    assert (float(load.kept_i.sum()) < float(load.chosen_i.sum())) == (factor < 1)
    assert_equal(trained_on(moe(router_spec, "gather")), expected)
    if factor > 1:
        assert_equal(trained_on(moe(router_spec, "dropless")), expected)


@pytest.mark.parametrize("gated", [True, False])
def test_experts_with_biases_agree(gated: bool) -> None:
    """Biases of experts and of their router, in all ways to dispatch."""
    expert = Mlp(activation="clamped_swiglu" if gated else "relu", gated=gated, biases=True)
    router_spec = TopK(k=2, normalises=True, capacity_factor=9.0)
    expected = trained_on(moe(router_spec, expert=expert), spread=0.5)
    mlp = expected[1]["decoder"]["layers_N"]["mlp"]
    names = {"bi_EF", "bo_ED", "router_bias_E"} | ({"bg_EF"} if gated else set())
    assert names <= {*mlp} and all(float(jnp.abs(mlp[name]).max()) > 1e-4 for name in names)
    for dispatch in ("gather", "dropless"):
        assert_equal(trained_on(moe(router_spec, dispatch, expert=expert), spread=0.5), expected)


def test_dropless_drops_nothing() -> None:
    router_spec = Top2(capacity_factor=0.1, least_capacity=1)
    load = load_of(trained_on(moe(router_spec, "dropless"))[0])
    assert float(load.kept_i.sum()) == float(load.chosen_i.sum())


@pytest.mark.parametrize("transposed", [False, True])
def test_blocks_are_multiplied_by_their_experts_weights(transposed: bool) -> None:
    rng = np.random.default_rng(0)
    x_lcd, w_edf = rng.normal(size=(6, 3, 4)), rng.normal(size=(5, 4, 7))
    expert_l = np.array([0, 0, 2, 2, 4, 5])  # the last is of no expert
    expected = np.einsum("lcd,ldf->lcf", x_lcd, np.append(w_edf, 0 * w_edf[:1], 0)[expert_l])
    weights = w_edf.swapaxes(1, 2) if transposed else w_edf
    product = jax.jit(in_turn, static_argnums=3)
    actual = product(x_lcd.astype("f"), weights.astype("f"), expert_l, transposed)
    np.testing.assert_allclose(actual, expected, atol=1e-5)


@pytest.mark.parametrize("group_tokens", [4, 16, 32])
def test_groups_are_parts_of_rows_or_several(group_tokens: int) -> None:
    """With room for all it makes no difference to the loss who shares a group."""
    router_spec = TopK(k=2, capacity_factor=9.0)
    expected = trained_on(moe(router_spec, "gather"))[0].loss
    actual = trained_on(moe(router_spec, "gather", group_tokens=group_tokens))[0].loss
    np.testing.assert_allclose(actual, expected, rtol=1e-6)


def test_a_smaller_batch_has_smaller_groups() -> None:
    """Two rows of 8 in place of four: their 16 tokens are one group and not half of one."""
    few = {name: array[:2] for name, array in ROWS.items()}
    router_spec = TopK(capacity_factor=0.5, least_capacity=1)
    expected = trained_on(moe(router_spec, "gather", group_tokens=16), few)[0].loss
    actual = trained_on(moe(router_spec, "gather", group_tokens=32), few)[0].loss
    assert float(actual) == float(expected)
    assert float(trained_on(moe(router_spec, "gather"), few)[0].loss) != float(expected)


@pytest.mark.parametrize("router", [Top2(random_second=False), TopK()], ids=kind)
def test_padding_takes_no_place(router: Router) -> None:
    """Padding in front of each row, in a group with it, drops no token more and moves no loss."""
    padded = {name: np.repeat(array, 2, axis=0) for name, array in ROWS.items()}
    for array in padded.values():
        array[::2] = 0

    def made(factor: float, tokens: int, rows: dict[str, Any]) -> tuple[LossSums, Any]:
        router_spec = dataclasses.replace(router, capacity_factor=factor, least_capacity=1)
        return trained_on(moe(router_spec, group_tokens=tokens), rows)

    alone, beside = made(1.0, 8, ROWS), made(0.5, 16, padded)  # as many places
    assert float(load_of(alone[0]).kept_i.sum()) < float(load_of(alone[0]).chosen_i.sum())
    for value, other in zip(load_of(beside[0]), load_of(alone[0]), strict=True):
        np.testing.assert_allclose(value, other, rtol=1e-5)
    np.testing.assert_allclose(beside[0].loss, alone[0].loss, rtol=1e-6)


@pytest.mark.parametrize(("dispatch", "rates"), [("gather", (0.5, None)), ("dropless", (0.0, 0.5))])
def test_experts_drop_hidden_units_of_training(
    dispatch: str, rates: tuple[float, float | None]
) -> None:
    """Nothing else in the layer needs a key: it routes alike, and has as many products."""
    dropout, hidden_dropout = rates
    experts = Moe(
        experts=5,
        router=TopK(capacity_factor=9.0),
        dispatch=dispatch,
        expert=Mlp(dropout=hidden_dropout),
    )
    rng = np.random.default_rng(0)
    x_BLD = rng.normal(size=(4, 8, 10)).astype(np.float32)
    segments_BL = np.ones((4, 8), np.int32)

    spec = toy(feed_forward=experts, dropout=dropout)

    @jax.jit
    def outputs(keys: jax.Array) -> tuple[jax.Array, jax.Array]:
        weights = Weights(WHOLE, spec.sizes, nnx.Rngs(params=jax.random.key(0)), jnp.float32)
        layer = MoeLayer(experts, spec, WHOLE, weights)
        drawn = jax.lax.map(lambda key: layer(x_BLD, segments_BL, key)[0], keys)
        return layer(x_BLD, segments_BL, None)[0], drawn

    with jax.set_mesh(make_mesh(WHOLE)):
        plain, drawn = outputs(jax.random.split(KEY, 256))
    scale = float(jnp.abs(plain).max())
    assert float(jnp.abs(drawn[0] - plain).max()) > 0.1 * scale
    np.testing.assert_allclose(drawn.mean(axis=0), plain, atol=0.3 * scale)


def test_scan_is_a_loop_and_a_pattern_counts_its_layers() -> None:
    pattern = (Block(feed_forward=Mlp()), Block())
    spec = dataclasses.replace(moe(Top2(), "gather"), layers=4, pattern=pattern)
    expected = trained_on(spec)
    assert_equal(trained_on(dataclasses.replace(spec, scan=True)), expected)
    assert expected[0].loads["decoder"]["layers_N/block1"].tokens.shape == (2,)
    assert expected[1]["decoder"]["layers_N"]["block1"]["mlp"]["wi_EDF"].shape == (2, 5, 10, 14)
    assert expected[1]["decoder"]["layers_N"]["block0"]["mlp"]["wi_DF"].shape == (2, 10, 14)


def test_encoders_have_patterns_of_their_own() -> None:
    experts = Moe(experts=5, router=Top2())
    pattern = (Block(), Block(feed_forward=experts))
    spec = toy(positions=Sinusoidal(), encoder_layers=2, encoder_pattern=pattern)
    sums, _ = trained_on(spec, PAIR_ROWS)
    assert sums.loads["decoder"] == {"layers_N": None}
    assert float(sums.loads["encoder"]["layers_N/block1"].kept_e.min()) > 0


def test_the_objective_has_the_routers_losses() -> None:
    plain = trained_on(moe(Top2(aux_loss=0.0, random_second=False)))[0]
    more = trained_on(moe(Top2(aux_loss=0.5, z_loss=0.25, random_second=False)))[0]
    load = load_of(more)
    added = (0.5 * load.aux + 0.25 * load.z)[0] / load.tokens[0]
    np.testing.assert_allclose(plain.objective, plain.loss, rtol=1e-6)
    total = more.total_objective(token_weights(ROWS))
    np.testing.assert_allclose(total - more.loss, added * more.tokens, rtol=1e-4)


def test_a_loss_of_few_targets_has_the_routers_losses_of_all_tokens_as_a_mean() -> None:
    """The router reads prompts, whose tokens are no targets, as well."""
    spec, mask_BL = moe(Top2(aux_loss=0.5, random_second=False)), np.zeros_like(ROWS["targets_BL"])
    mask_BL[:, ::3] = 1
    batch = {**ROWS, "loss_mask_BL": mask_BL}
    (every, _), (few, _) = trained_on(spec), trained_on(spec, batch)
    means = [
        (sums.total_objective(token_weights(of)) - sums.loss) / sums.tokens
        for sums, of in ((every, ROWS), (few, batch))
    ]
    assert 0 < few.tokens < every.tokens / 2
    np.testing.assert_allclose(means[1], means[0], rtol=1e-4)


def test_a_token_cannot_have_more_experts_than_there_are() -> None:
    with pytest.raises(UserError, match="at least as many experts"):
        Moe(experts=1)
