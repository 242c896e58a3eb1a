"""Norms by part: every weight has its part, and the parts are all of the gradient."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import traverse_util

from models.adapters.lora import Lora
from models.feed_forward.moe.layer import Moe
from models.parts import Block
from models.positions.relative import Relative
from tests.toys import TOY, WHOLE
from trainer.step import grad_norms

DENSE = {"attention", "mlp", "norms", "embed", "softmax"}
EXPERTS = (Block(), Block(feed_forward=Moe(experts=4)))


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"tied": False}, DENSE),
        ({"encoder_layers": 1, "source_vocab": 30}, {*DENSE, "source_attention"} - {"softmax"}),
        ({"pattern": EXPERTS}, {*DENSE, "experts", "router"} - {"softmax"}),
        ({"positions": Relative(shared=True)}, {*DENSE, "other"} - {"softmax"}),
        ({"adapter": Lora(rank=3)}, {*DENSE} - {"softmax"}),
    ],
    ids=["dense", "encoder", "experts", "relative", "adapters"],
)
def test_each_weight_has_its_part(changes: dict[str, Any], parts: set[str]) -> None:
    weights = dataclasses.replace(TOY, **changes).model(WHOLE).weights()
    rng = np.random.default_rng(0)
    flat = {path: jnp.asarray(rng.normal(size=info.shape)) for path, info in weights.items()}
    gradients = traverse_util.unflatten_dict(flat, sep="/")
    norms = jax.jit(grad_norms)(gradients)
    assert norms.pop("grad_norm") == jax.jit(optax.tree.norm)(gradients)  # bit for bit
    assert {name.removeprefix("grad_norm/") for name in norms} == parts
    squares = sum(norm**2 for norm in norms.values())
    np.testing.assert_allclose(squares, optax.tree.norm(gradients) ** 2, rtol=1e-5)
    attention = [x for path, x in flat.items() if "/attention/" in path]
    expected = np.sqrt(sum((np.asarray(x, np.float64) ** 2).sum() for x in attention))
    np.testing.assert_allclose(norms["grad_norm/attention"], expected, rtol=1e-5)


def test_sums_of_half_precision_are_not_in_half_precision() -> None:
    """In bfloat16 the sum of 1,000 ones is 256, in float16 the square of 1e-4 is 0."""
    ones = {str(i): jnp.ones((), jnp.bfloat16) for i in range(1000)}
    np.testing.assert_allclose(grad_norms(ones)["grad_norm"], 1000**0.5, rtol=1e-5)
    small = {"x": jnp.full(10_000, 1e-4, jnp.float16)}
    np.testing.assert_allclose(grad_norms(small)["grad_norm"], 1e-2, rtol=1e-2)
