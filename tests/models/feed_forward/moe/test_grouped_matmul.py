"""Kernels of grouped products equal one product after the other, and compile for TPUs."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding

from layouts.absent_devices import has_compiler, topology_mesh
from layouts.layout import Layout
from layouts.mesh import uncached
from models.feed_forward.mlp import Mlp
from models.feed_forward.moe import grouped_matmul
from models.feed_forward.moe.dispatch import block_slots
from models.feed_forward.moe.grouped_matmul import (
    block_tokens,
    gated_product,
    grouped_product,
    padded_size,
    tile_of,
    zeroing_blocks,
)
from models.feed_forward.moe.layer import Moe
from models.feed_forward.moe.routing import TopK
from models.initializers import Weights
from tests.toys import optax_promotion, toy

EXPERTS, TOKENS, D, F = 4, 16, 256, 384
# Of experts some have no block, first or last, and the last blocks have no expert.
BLOCKS = [
    [0, 0, 1, 3],
    [1, 1, 2, 4, 4],
    [2],
    [4, 4],
    [0, 1, 2, 3, 3],
    [0, 1, 2, 3, 4, 4, 4, 4],
    [1, 1, 3, 4, 4, 4, 4, 4],
    [3, 3, 3, 3, 3, 4, 4, 4],
    [4] * 8,
]


def results(expert: list[int], d: int = D, f: int = F) -> list[np.ndarray]:
    """Returns what two products make of random blocks, and all gradients."""
    rng = np.random.default_rng(0)
    expert_l = jnp.asarray(expert, jnp.int32)
    shapes = (len(expert), TOKENS, d), (EXPERTS, d, f), (EXPERTS, f, d), (len(expert), TOKENS)
    arrays = [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]
    dy = jnp.asarray(rng.normal(size=shapes[0]), jnp.float32)

    def computed(x: Any, wi: Any, wo: Any, gate: Any) -> Any:
        return gated_product(jnp.sin(grouped_product(x, wi, expert_l)), wo, expert_l, gate)

    @jax.jit
    def run(dy: Any, *arrays: Any) -> Any:
        y, backward = jax.vjp(computed, *arrays)
        return (y, *backward(dy))

    return [np.asarray(array) for array in run(dy, *arrays)]


@pytest.mark.parametrize("expert", BLOCKS, ids=str)
def test_kernels_equal_one_product_after_the_other(
    expert: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = results(expert)
    monkeypatch.setattr(grouped_matmul, "is_interpreted", lambda: True)
    for array, other in zip(results(expert), expected, strict=True):
        np.testing.assert_allclose(array, other, rtol=0, atol=1e-5 * max(1, np.abs(other).max()))


@pytest.mark.parametrize(("d", "f"), [(130, 640), (256, 600), (20, 200)])
def test_sizes_that_no_tile_divides_are_padded(
    d: int, f: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = results(BLOCKS[1], d, f)
    monkeypatch.setattr(grouped_matmul, "is_interpreted", lambda: True)
    for array, other in zip(results(BLOCKS[1], d, f), expected, strict=True):
        assert array.shape == other.shape
        np.testing.assert_allclose(array, other, rtol=0, atol=1e-5 * max(1, np.abs(other).max()))


def test_gradients_of_blocks_in_bfloat16_are_added_in_float32() -> None:
    rng = np.random.default_rng(2)
    x, dy = (jnp.asarray(rng.normal(size=(300, 4, width)) + 1, jnp.bfloat16) for width in (D, F))
    weights = jnp.zeros((1, D, F), jnp.bfloat16)
    run = jax.jit(grouped_matmul.weight_gradient)
    actual = np.asarray(run(x, dy, weights, jnp.zeros(300, jnp.int32))[0], np.float64)
    expected = np.einsum("lcd,lcf->df", np.asarray(x, np.float64), np.asarray(dy, np.float64))
    np.testing.assert_allclose(actual, expected, rtol=2**-8)  # half of the last bit


def test_gates_multiply_results_and_have_their_gradient() -> None:
    """Compared with the gradient that JAX derives, which needs the result."""
    rng = np.random.default_rng(1)
    expert_l = jnp.asarray([0, 2, 4], jnp.int32)
    shapes = (3, TOKENS, F), (EXPERTS, F, D), (3, TOKENS)
    h, w, gate = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes)
    dy = jnp.asarray(rng.normal(size=(3, TOKENS, D)), jnp.float32)

    def derived(h: Any, w: Any, gate: Any) -> Any:
        padded = jnp.concatenate([w, jnp.zeros_like(w[:1])])
        return jnp.einsum("lcf,lfd->lcd", h, padded[expert_l]) * gate[:, :, None]

    def written(h: Any, w: Any, gate: Any) -> Any:
        return gated_product(h, w, expert_l, gate)

    pairs = [jax.vjp(function, h, w, gate) for function in (written, derived)]
    for array, other in zip(*((y, *backward(dy)) for y, backward in pairs), strict=True):
        np.testing.assert_allclose(array, other, rtol=0, atol=2e-5 * np.abs(other).max())


def test_blocks_are_a_part_of_an_experts_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    def sizes() -> list[int]:
        return [block_tokens(choices, 8) for choices in (4, 80, 1_024, 8_000, 65_536)]

    assert sizes() == [1, 10, 128, 128, 128]
    monkeypatch.setattr(grouped_matmul, "platform", lambda: "gpu")
    assert sizes() == [16, 16, 128, 512, 1024]
    monkeypatch.setattr(grouped_matmul, "is_interpreted", lambda: True)
    assert sizes() == [16, 16, 32, 128, 512]


@pytest.mark.parametrize("seed", range(20))
def test_each_expert_without_tokens_has_a_block_that_writes_its_zeros(seed: int) -> None:
    rng = np.random.default_rng(seed)
    count, used = 64, rng.integers(1, 65)
    choices = rng.choice(rng.permutation(count)[:used], int(rng.integers(64, 4_000)))

    @jax.jit
    def numbers(choices: Any) -> Any:
        _, expert_l = block_slots(choices, count, 16, spare=4)
        return zeroing_blocks(expert_l, jnp.isin(jnp.arange(count), expert_l))

    number_l = np.asarray(numbers(choices))
    missing = set(range(count)) - set(choices.tolist())
    assert {n - count for n in number_l.tolist() if n >= count} >= missing
    # Of each expert all blocks follow each other: one that comes back would lose its sum.
    runs = [n for i, n in enumerate(number_l % count) if i == 0 or n != number_l[i - 1] % count]
    assert len(runs) == len(set(runs))


def test_tiles_divide_axes() -> None:
    assert [tile_of(size) for size in (64, 128, 1536, 4096, 14_336)] == [64, 128, 768, 1024, 1024]
    assert [padded_size(size) for size in (100, 130, 2880, 2944)] == [100, 256, 3072, 2944]


@pytest.mark.skipif(not has_compiler("tpu"), reason="libtpu is not installed: pip install libtpu")
@pytest.mark.parametrize(
    ("slice", "rules"),
    [
        ("v5e:4x4", "batch:data;batch:model"),
        ("v5p:2x2x1", "batch:data;experts:data"),
        ("v6e:4x4", "batch:data;d_ff:model"),
    ],
)
def test_dropless_experts_compile_for_tpus(slice: str, rules: str) -> None:
    """Forward and backward, where weights are gathered, tokens are sent, and d_ff is split."""
    devices = int(np.prod([int(n) for n in slice.partition(":")[2].split("x")]))
    sizes = {"data": 2, "model": devices // 2}
    layout = Layout(mesh=f"data:2,model:{devices // 2}", rules=rules, param_rules="d_model:data")
    mesh = topology_mesh(slice, sizes)
    spec = toy(d_model=256, d_ff=2048, length=512)
    moe = Moe(
        experts=4, dispatch="dropless", router=TopK(k=2), expert=Mlp(activation="silu", gated=True)
    )

    def objective(x_BLD: jax.Array) -> jax.Array:
        weights = Weights(layout, spec.sizes, nnx.Rngs(params=jax.random.key(0)), "bfloat16")
        y_BLD, _ = moe.build(spec, layout, weights)(x_BLD, None)
        return jnp.sum(y_BLD.astype(jnp.float32) ** 2)

    x_BLD = jax.ShapeDtypeStruct(
        (devices, 512, 256), "bfloat16", sharding=NamedSharding(mesh, layout.place("BLD"))
    )
    with jax.set_mesh(mesh), optax_promotion(), uncached():
        text = jax.jit(jax.grad(objective)).lower(x_BLD).as_text()
        jax.jit(jax.grad(objective)).lower(x_BLD).compile()
    assert "grouped_product" in text
