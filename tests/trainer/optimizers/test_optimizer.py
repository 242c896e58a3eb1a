"""Laws of every optimizer."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.toys import optax_promotion
from tests.trainer.optimizers.updates import assert_same, transform_of, trees, updated
from trainer.optimizers.adafactor import Adafactor
from trainer.optimizers.adamw import AdamW
from trainer.optimizers.muon import Muon


@pytest.mark.parametrize(
    "optimizer",
    [AdamW(weight_decay=0.1), Adafactor(factored_from=8, momentum=0.9, weight_decay=0.1,
                                        clip_global_norm=2.0)],
    ids=["AdamW", "Adafactor"],
)  # fmt: skip
def test_the_result_does_not_depend_on_how_layers_are_stored(optimizer: Any) -> None:
    layers, gradients = trees(0), [trees(seed) for seed in range(1, 6)]
    expected = updated(optimizer, layers, gradients, False)
    assert_same(updated(optimizer, layers, gradients, True), expected)


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", [AdamW, Muon, Adafactor])
def test_first_moments_may_be_stored_in_16_bits(kind: Any) -> None:
    """Their bytes halve; updates differ by the rounding of a moment, not by more."""
    momentum = {"momentum": 0.9} if kind is Adafactor else {}
    params = {"layers_N": jax.tree.map(lambda *x: jnp.stack(x), *trees_of_32_bits(0))}
    gradients = {"layers_N": jax.tree.map(lambda *x: jnp.stack(x), *trees_of_32_bits(1))}
    updates, sizes = [], []
    with optax_promotion():
        for first_moment in (None, "bfloat16"):
            transform = transform_of(kind(**momentum, first_moment=first_moment), params)
            state = transform.init(params)
            for _ in range(3):
                update, state = transform.update(gradients, state, params)
            updates.append(update)
            halved = [x for x in jax.tree.leaves(state) if x.dtype == jnp.bfloat16]
            sizes.append(sum(x.size for x in halved))
    assert sizes == [0, sum(x.size for x in jax.tree.leaves(params))]
    exact, rounded = updates
    error = optax.tree.norm(optax.tree.sub(exact, rounded)) / optax.tree.norm(exact)
    assert 0 < error < 0.01


def trees_of_32_bits(seed: int) -> list[dict[str, Any]]:
    return jax.tree.map(lambda x: jnp.asarray(x, np.float32), trees(seed))
