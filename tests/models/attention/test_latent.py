"""Multi-head latent attention against a numpy version written from the paper."""

import re

import jax
import numpy as np
import pytest
from flax import nnx

from configs.errors import UserError
from layouts.mesh import make_mesh
from models.attention.context import packed_context
from models.attention.latent import Latent
from models.attention.multi_head import MultiHead
from models.initializers import Weights
from models.parts import Block
from models.positions.relative import Relative
from models.positions.rotary import Rotary
from models.transformer import Transformer
from tests.toys import WHOLE, toy

Array = np.ndarray


def rms(x: Array) -> Array:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)


def rotated(x: Array, positions: Array) -> Array:
    """Pairs of the halves of the last axis turn by position x rate; the first axis is positions."""
    half = x.shape[-1] // 2
    angle = positions[:, None] * 10_000.0 ** (-np.arange(half) / half)
    angle = angle.reshape(len(x), *[1] * (x.ndim - 2), half)
    left, right = x[..., :half], x[..., half:]
    turned = (
        left * np.cos(angle) - right * np.sin(angle),
        right * np.cos(angle) + left * np.sin(angle),
    )
    return np.concatenate(turned, axis=-1)


def latent_attention(x: Array, weights: dict[str, Array], query_latent: bool) -> Array:
    """DeepSeek-V2, equations 9 to 19 (and 37 to 47): one row without padding, a head at a time."""
    positions = np.arange(len(x))
    latent = rms(x @ weights["wkv_latent_DR"])
    key_rope = rotated(x @ weights["wk_rotated_DP"], positions)
    source = rms(x @ weights["wq_latent_DO"]) if query_latent else x
    letter = "O" if query_latent else "D"
    plain, turning = weights[f"wq_{letter}JQK"], weights[f"wq_rotated_{letter}JQP"]
    output = 0.0
    for j, q in np.ndindex(plain.shape[1:3]):
        query = source @ plain[:, j, q]
        query_rope = rotated(source @ turning[:, j, q], positions)
        key, value = latent @ weights["wk_RJK"][:, j], latent @ weights["wv_RJK"][:, j]
        logits = query @ key.T + query_rope @ key_rope.T
        logits /= np.sqrt(key.shape[1] + key_rope.shape[1])
        logits[np.triu_indices(len(x), 1)] = -np.inf
        probs = np.exp(logits - logits.max(1, keepdims=True))
        output += probs / probs.sum(1, keepdims=True) @ value @ weights["wo_JQKD"][j, q]
    return output


@pytest.mark.parametrize("query_latent", [None, 9])
def test_latent_attention_is_the_papers(query_latent: int | None) -> None:
    spec = toy(positions=Rotary(), attention=Latent(latent=5, rotated=6, query_latent=query_latent))
    [block] = spec.blocks
    rng = np.random.default_rng(0)
    x_BLD = rng.normal(size=(2, 7, spec.d_model)).astype(np.float32)
    with jax.set_mesh(make_mesh(WHOLE)):
        weights = Weights(WHOLE, spec.sizes, nnx.Rngs(params=0), "float32")
        layer = block.attention.build(block, spec, WHOLE, weights)
        positions_BL = np.tile(np.arange(7, dtype=np.int32), (2, 1))
        context = packed_context(
            WHOLE, jax.numpy.asarray(positions_BL), jax.numpy.ones((2, 7), int)
        )
        prepared = block.positions.prepare(context.positions_BL, 6)
        context = jax.tree_util.tree_map(lambda x: x, context)
        context = type(context)(**{**vars(context), "prepared": prepared})
        y_BLD, _ = layer(jax.numpy.asarray(x_BLD), context)
    params = {name: np.asarray(p) for name, p in nnx.to_pure_dict(nnx.state(layer)).items()
              if not isinstance(p, dict)}  # fmt: skip
    for x_LD, y_LD in zip(x_BLD, np.asarray(y_BLD), strict=True):
        expected = latent_attention(x_LD, params, query_latent is not None)
        np.testing.assert_allclose(y_LD, expected, rtol=2e-5, atol=2e-6)


def test_the_cache_holds_one_vector_for_each_token() -> None:
    """5 + 2 numbers in each layer, whatever the heads; grouped heads keep 2 x 3 x 4."""
    sizes = {}
    for name, attention in (("latent", Latent(latent=5, rotated=2)), ("grouped", MultiHead())):
        model = toy(positions=Rotary(), attention=attention).model(WHOLE)
        with jax.set_mesh(make_mesh(WHOLE)):
            params = model.init(jax.random.key(0))
            cache = jax.eval_shape(
                lambda p, m=model: m.init_cache(m.prepare(p), None, 3, 11), params
            )
        sizes[name] = sum(x.size for x in jax.tree.leaves(cache["layers"])) / (2 * 3 * 11)
    assert sizes == {"latent": 5 + 2, "grouped": 2 * 3 * 4}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"positions": Relative()}, "@Latent(): found positions = @Relative()"),
        ({"encoder_layers": 1}, "@Latent(): used as cross-attention"),
        ({"attention": Latent(latent=4, rotated=3)}, "Latent.rotated = 3: rotation needs an even"),
    ],
)
def test_what_latent_attention_cannot_do_is_refused(changes: dict, message: str) -> None:
    settings = {"positions": Rotary(), "attention": Latent(latent=4, rotated=2), **changes}
    with pytest.raises(UserError, match=re.escape(message)):
        toy(**settings)


def test_attention_to_a_source_may_be_of_another_kind() -> None:
    spec: Transformer = toy(
        positions=Rotary(), attention=Latent(latent=4, rotated=2), encoder_layers=1,
        pattern=(Block(source_attention=MultiHead()),),
    )  # fmt: skip
    assert isinstance(spec.blocks[0].source_attention, MultiHead)
    assert isinstance(spec.encoder_blocks[0].attention, Latent)
