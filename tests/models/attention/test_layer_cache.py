"""A layer's cache, alone and in the stack of all layers, holds what numpy writes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layouts.layout import Layout
from layouts.mesh import make_mesh
from models.attention import layer_cache
from models.attention.layer_cache import LayerCache, read, write

LAYOUT = Layout(mesh="data:4,model:2", rules="batch:data;heads:model")
LAYERS, SHAPE = 3, (4, 2, 5, 6)  # of a layer: BJMK


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
@pytest.mark.parametrize("tokens", [1, 2])
def test_tokens_are_written_to_one_layer(
    platform: str, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layer_cache, "platform", lambda: platform)
    rng = np.random.default_rng(0)
    old = rng.normal(size=(LAYERS, *SHAPE)).astype("f")
    new = rng.normal(size=(*SHAPE[:2], tokens, SHAPE[3])).astype("f")
    expected = old.copy()
    expected[1, :, :, 2 : 2 + tokens] = new
    with jax.set_mesh(make_mesh(LAYOUT)):
        stack = LAYOUT.reshard(jnp.asarray(old), "NBJMK")
        new_BJMK = LAYOUT.reshard(jnp.asarray(new), "BJMK")

        @jax.jit
        def written(stack: jax.Array, layer: jax.Array, index: jax.Array) -> tuple:
            of_stack = write(LayerCache(stack, layer), new_BJMK, index, axis=2)
            alone = write(LAYOUT.unstack(stack)[1], new_BJMK, index, axis=2)
            assert isinstance(of_stack, LayerCache)
            return of_stack.stack, read(of_stack), read(alone)

        results = written(stack, jnp.asarray(1), jnp.asarray(2))
    assert results[0].sharding.spec == stack.sharding.spec
    for result, true in zip(results, (expected, expected[1], expected[1]), strict=True):
        np.testing.assert_array_equal(np.asarray(result), true)


def test_no_layer_is_copied_to_write_a_token() -> None:
    """The compiled loop over layers needs less memory than the array of one layer takes."""
    shape = (64, 1, 1, 512, 32)

    def step(stack: jax.Array, index: jax.Array) -> jax.Array:
        def layer(stack: jax.Array, number: jax.Array) -> tuple[jax.Array, None]:
            new = jnp.full((1, 1, 1, shape[-1]), number, float)
            cache = write(LayerCache(stack, number), new, index, axis=2)
            assert isinstance(cache, LayerCache)
            return cache.stack, None

        return jax.lax.scan(layer, stack, jnp.arange(shape[0]))[0]

    with jax.set_mesh(make_mesh(Layout(mesh="data:1", rules=""))):
        stack = jnp.zeros(shape)
        compiled = jax.jit(step, donate_argnums=0).lower(stack, jnp.asarray(3)).compile()
        result = compiled(stack, jnp.asarray(3))
    assert compiled.memory_analysis().temp_size_in_bytes < stack.nbytes // shape[0]
    np.testing.assert_array_equal(np.asarray(result)[:, 0, 0, 3, 0], np.arange(shape[0]))
