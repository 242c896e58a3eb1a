"""Where nothing is dropped, the way to the experts changes no number, under no layout."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from layouts.layout import Layout
from layouts.lint.recorder import record
from layouts.lint.report import lint
from layouts.mesh import make_mesh
from models.feed_forward.mlp import Mlp
from models.feed_forward.moe.dispatch import block_slots, combine
from models.feed_forward.moe.exchange import Exchange
from models.feed_forward.moe.layer import Dispatch, Moe, MoeLayer
from models.feed_forward.moe.routing import Top2, TopK
from models.initializers import Weights
from models.transformer import Transformer
from tests.toys import WHOLE, toy

# Float32 sums of some tens of terms in another order, in numbers of size 1.
ROUND_OFF = 1e-5
LAYOUTS = (
    WHOLE,
    Layout(mesh="data:4,model:2", rules="batch:data;experts:data;d_ff:model"),
    Layout(mesh="data:2,expert:2", rules="batch:data;batch:expert;experts:expert"),
    Layout(mesh="x:2,y:2", rules="batch:x;d_ff:y;d_model:y?", param_rules="d_model:x"),
    Layout(mesh="x:2,y:2", rules="length:x;d_ff:x?;experts:y;group_tokens:x;capacity:y;choices:x"),
)


class Case(NamedTuple):
    """A layer, the size of its input, and a layout."""

    spec: Transformer
    rows: int
    length: int
    layout: Layout


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Sizes that divide over all meshes; groups are parts of rows, rows, or two of them."""
    rows, length = 4 * draw(st.integers(1, 2)), 2 * draw(st.integers(1, 5))
    experts = 4 * draw(st.integers(1, 2))
    router = draw(
        st.sampled_from([Top2(capacity_factor=99.0), TopK(k=3, capacity_factor=99.0, jitter=0.1)])
    )
    moe = Moe(
        experts=experts, d_ff=2 * draw(st.integers(2, 9)), router=router,
        group_tokens=draw(st.sampled_from([None, 2])), expert=Mlp(gated=draw(st.booleans())),
    )  # fmt: skip
    spec = toy(
        feed_forward=moe, d_model=2 * draw(st.integers(3, 6)),
        dropout=draw(st.sampled_from([0.0, 0.4])),
    )  # fmt: skip
    return Case(spec, rows, length, draw(st.sampled_from(LAYOUTS)))


@functools.cache
def results(case: Case, dispatch: Dispatch) -> Any:
    """Returns the layer's output and all gradients."""
    layout, spec = case.layout, case.spec
    rng, shape = np.random.default_rng(0), (case.rows, case.length, spec.d_model)
    x, dy = (rng.normal(size=shape).astype(np.float32) for _ in range(2))
    segments = (rng.random(shape[:2]) < 0.8).astype(np.int32)

    @jax.jit
    def run() -> Any:
        graph, params = nnx.split(layer(case, dispatch))
        x_BLD, dy_BLD = layout.reshard(x, "BLD"), layout.reshard(dy, "BLD")
        segments_BL = layout.reshard(segments, "BL")

        def objective(params: nnx.State, x_BLD: jax.Array) -> tuple[jax.Array, jax.Array]:
            y_BLD, load = nnx.merge(graph, params)(x_BLD, segments_BL, jax.random.key(2))
            return jnp.sum(y_BLD * dy_BLD) + load.aux + load.z, y_BLD

        return jax.grad(objective, argnums=(0, 1), has_aux=True)(params, x_BLD)

    with jax.set_mesh(make_mesh(layout)):
        return jax.device_get(run())


def layer(case: Case, dispatch: Dispatch) -> MoeLayer:
    """Returns the layer with random weights."""
    assert isinstance(case.spec.feed_forward, Moe)
    moe = dataclasses.replace(case.spec.feed_forward, dispatch=dispatch)
    spec, rngs = (
        dataclasses.replace(case.spec, feed_forward=moe),
        nnx.Rngs(params=jax.random.key(1)),
    )
    return MoeLayer(moe, spec, case.layout, Weights(case.layout, spec.sizes, rngs, "float32"))


def assert_equal(results: Any, expected: Any) -> None:
    for result, other in zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True):
        scale = max(float(np.abs(other).max()), 1.0)
        np.testing.assert_allclose(result, other, rtol=0, atol=ROUND_OFF * scale)


@settings(max_examples=4, deadline=None, derandomize=True, phases=[Phase.generate])
@given(cases(), st.sampled_from(["gather", "dropless"]))
def test_all_ways_to_dispatch_agree(case: Case, dispatch: Dispatch) -> None:
    """Dropout too: its bits follow from the token and the choice."""
    expected = results(case._replace(layout=WHOLE), "einsum")
    assert_equal(results(case, "einsum"), expected)
    assert_equal(results(case, dispatch), expected)


@pytest.mark.few(2)
@pytest.mark.parametrize("layout", LAYOUTS[1:], ids=lambda layout: layout.rules)
def test_dropless_with_dropout_is_equal_under_layouts(layout: Layout) -> None:
    moe = Moe(experts=8, d_ff=6, router=Top2(), group_tokens=2, expert=Mlp(gated=True))
    case = Case(toy(feed_forward=moe, dropout=0.4), 4, 6, layout)
    assert_equal(results(case, "dropless"), results(case._replace(layout=WHOLE), "dropless"))


EXCHANGING = (*LAYOUTS[1:3], Layout(mesh="x:2,y:2", rules="batch:x;batch:y;experts:x;experts:y"))


@pytest.mark.few(1)
@pytest.mark.parametrize("layout", EXCHANGING, ids=lambda layout: layout.rules)
def test_tokens_are_sent_to_experts_where_these_are_larger(layout: Layout) -> None:
    moe = Moe(experts=8, d_ff=60, router=Top2(), expert=Mlp(gated=True))
    case = Case(toy(feed_forward=moe, dropout=0.4), 4, 3, layout)
    assert_equal(results(case, "dropless"), results(case._replace(layout=WHOLE), "dropless"))

    def is_exchanged(rows: int) -> bool:
        def run(x_BLD: jax.Array) -> jax.Array:
            x_BLD = layout.reshard(x_BLD, "BLD")
            return layer(case, "dropless")(x_BLD, None, jax.random.key(0))[0]

        with jax.set_mesh(make_mesh(layout)):
            return "ragged_all_to_all" in str(jax.make_jaxpr(run)(jnp.ones((rows, 3, 10))))

    assert is_exchanged(4) and not is_exchanged(400)


def test_tokens_stay_where_experts_do_not_divide() -> None:
    """The rule for experts yields to that of the weights' width, so that the layout is legal."""
    layout = Layout(mesh="x:4", rules="batch:x;experts:x?", param_rules="d_model:x")
    moe = Moe(experts=6, d_ff=60, router=Top2())
    case = Case(toy(feed_forward=moe, d_model=8), 4, 3, layout)
    assert_equal(results(case, "dropless"), results(case._replace(layout=WHOLE), "dropless"))


def test_decoding_leaves_tokens_where_experts_do_not_divide() -> None:
    layout = Layout(mesh="x:4", rules="experts:x?;d_model:x")
    moe = Moe(experts=6, d_ff=60, router=Top2())
    case = Case(toy(feed_forward=moe, d_model=8), 4, 3, layout)
    assert_equal(decoded(case, None), decoded(case._replace(layout=WHOLE), None))


@pytest.mark.parametrize("dispatch", ["gather", "dropless"])
def test_layouts_that_work_are_not_refused(dispatch: Dispatch) -> None:
    """Nor are rules for axes that are replicated wherever they stand, which do nothing."""
    moe = Moe(experts=8, d_ff=6, router=Top2())
    case = Case(toy(feed_forward=moe, dropout=0.4), 4, 6, WHOLE)

    def trace(layout: Layout) -> Any:
        moe_layer = layer(case._replace(layout=layout), dispatch)
        x_BLD = layout.reshard(jnp.ones((4, 6, 10)), "BLD")
        moe_layer(x_BLD, layout.reshard(jnp.ones((4, 6), jnp.int32), "BL"), jax.random.key(0))
        return nnx.to_pure_dict(nnx.state(moe_layer))

    recorded = record(trace)
    for layout in LAYOUTS[1:]:
        problems = lint(layout, make_mesh(layout).shape, recorded, {})
        assert not [problem for problem in problems if problem.severity == "error"]
    idle = [problem for problem in problems if problem.code == "unmatched-rule"]
    assert [problem.rule.partition(" ")[0] for problem in idle] == [
        "group_tokens:x", "capacity:y", "choices:x",
    ]  # fmt: skip


# Also with experts over mesh axes in another order, or over some that do not split the tokens.
DECODING = (
    *LAYOUTS,
    Layout(mesh="x:2,y:2", rules="batch:x;batch:y;experts:y;experts:x"),
    Layout(mesh="x:2,y:2,z:2", rules="batch:x;batch:z;experts:y;experts:x;d_ff:y?"),
)


def decoded(case: Case, expert: int | None, *, drop_tokens: bool = False) -> np.ndarray:
    """Returns what decoding makes of some tokens; with an expert, all choose it and the next."""
    layout = case.layout
    x = np.random.default_rng(0).normal(size=(case.rows, case.length, case.spec.d_model))
    x = x.astype(np.float32)

    @jax.jit
    def run() -> jax.Array:
        moe_layer = layer(case, "gather")
        if expert is not None:
            x[:, :, 0] = 9
            router_DE = np.zeros((case.spec.d_model, 8), np.float32)
            router_DE[0, expert : expert + 2] = 2, 1
            moe_layer.router_DE[...] = layout.reshard(jnp.asarray(router_DE), "DE", stored=True)
        return moe_layer(layout.reshard(x, "BLD"), None, drop_tokens=drop_tokens)[0]

    with jax.set_mesh(make_mesh(layout)):
        return np.asarray(run())


@pytest.mark.few(5)
@pytest.mark.parametrize("expert", [None, 4])
@pytest.mark.parametrize("layout", DECODING, ids=lambda layout: layout.rules)
def test_decoding_drops_nothing_under_layouts(layout: Layout, expert: int | None) -> None:
    """It is a layer in which each expert has room for all tokens, also if these take rounds."""
    roomy, tight = (
        Moe(experts=8, d_ff=6, router=TopK(k=2, evaluation_capacity_factor=factor))
        for factor in (99.0, 1.0)
    )
    case = Case(toy(feed_forward=roomy), 4, 6, WHOLE)
    expected = decoded(case, expert, drop_tokens=True)
    for moe in (roomy, tight):
        case = Case(toy(feed_forward=moe), 4, 6, layout)
        assert_equal(decoded(case, expert), expected)


def test_what_overflows_a_round_needs_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    moe = Moe(experts=8, d_ff=6, router=TopK(k=2, evaluation_capacity_factor=1.0))
    case = Case(toy(feed_forward=moe), 4, 6, LAYOUTS[1])
    expected = decoded(case, 4)
    monkeypatch.setattr(Exchange, "most_rows", lambda exchange, _: jnp.int32(exchange.places))
    lost = np.all(decoded(case, 4) == 0, axis=-1)
    assert not np.all(expected == 0, axis=-1).any()
    # Of 48 choices of 24 tokens, two experts of one device are all, and it has 12 places a round.
    assert lost.sum() == 18


def decoding_bytes(experts: int) -> int:
    """Returns the memory of one token of each of 96 rows, beside the weights."""
    spec = toy(feed_forward=Moe(experts=experts, d_ff=100), d_model=50)
    with jax.set_mesh(make_mesh(WHOLE)):
        graph, params = nnx.split(jax.eval_shape(lambda: layer(Case(spec, 96, 1, WHOLE), "gather")))
        decode = jax.jit(
            lambda params, x_BLD: nnx.merge(graph, params)(x_BLD, None, drop_tokens=False)[0]
        )
        compiled = decode.lower(params, jax.ShapeDtypeStruct((96, 1, 50), jnp.float32)).compile()
    return int(compiled.memory_analysis().temp_size_in_bytes)


def test_decoding_has_room_for_the_tokens_and_not_for_them_in_every_expert() -> None:
    assert decoding_bytes(64) < 1.5 * decoding_bytes(8)


CHOICES, COUNT = 20, 5
slots = jax.jit(block_slots, static_argnums=(1, 2))


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(-1, COUNT), min_size=CHOICES, max_size=CHOICES), st.sampled_from([1, 3, 8])
)
def test_blocks_hold_each_choice_once_and_one_expert_each(experts: list[int], size: int) -> None:
    """Experts 0 to 4 are here; -1 and 5 are not."""
    slot_i, expert_l = map(np.asarray, slots(np.array(experts), COUNT, size))
    here = [slot for slot, expert in zip(slot_i, experts, strict=True) if 0 <= expert < COUNT]
    assert len(set(here)) == len(here)
    for slot, expert in zip(slot_i, experts, strict=True):
        if 0 <= expert < COUNT:
            assert expert_l[slot // size] == expert
        else:
            assert slot == len(expert_l) * size
    assert list(expert_l) == sorted(expert_l)
    assert len(expert_l) * size < CHOICES + COUNT * size


def test_gradients_in_bfloat16_are_those_of_float32_to_its_round_off() -> None:
    rng = np.random.default_rng(0)
    slots = rng.permutation(6).astype(np.int32)
    here_1c = np.argsort(slots).astype(np.int32)[None]
    y_1cD, dy_1sD = rng.normal(size=(1, 6, 4)), rng.normal(size=(1, 3, 4))
    gates_1si = rng.random((1, 3, 2)).astype(np.float32)

    def gradients(dtype: jax.typing.DTypeLike) -> tuple[jax.Array, jax.Array]:
        def objective(y_1cD: jax.Array, gates_1si: jax.Array) -> jax.Array:
            out_1sD = combine(y_1cD, slots.reshape(1, 3, 2), here_1c, gates_1si)
            return jnp.sum(out_1sD.astype(float) * jnp.asarray(dy_1sD, float))

        return jax.grad(objective, (0, 1))(jnp.asarray(y_1cD, dtype), jnp.asarray(gates_1si))

    for narrow, wide in zip(gradients(jnp.bfloat16), gradients(float), strict=True):
        np.testing.assert_allclose(narrow.astype(float), wide, rtol=0, atol=2e-2)
