"""The nucleus: the same tokens as by sorting, however the vocabulary is split."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding

from layouts.layout import Layout
from layouts.mesh import make_mesh
from models.decoding.sampling import nucleus, nucleus_of_sorted
from tests.toys import WHOLE

SPLIT = Layout(mesh="data:2,model:4", rules="batch:data;vocab:model")
VOCAB = 40
RNG = np.random.default_rng(0)
RANDOM = RNG.normal(0, 2, (2, 3, VOCAB))
LOGITS = {
    "random": RANDOM,
    "with equals": np.round(RANDOM),
    "all equal": np.full((2, 3, VOCAB), -7.0),
    "two signs of zero": np.where(RANDOM > 0, 0.0, -0.0),
    "some impossible": np.where(RNG.random(RANDOM.shape) < 0.3, -np.inf, RANDOM),
    "one certain": np.where(np.arange(VOCAB) == 21, 200.0, RANDOM),
}


def reference(logits_V: np.ndarray, top_p: float) -> np.ndarray:
    """Returns the tokens ahead of which there is less than top_p, the first in any case."""
    order = np.argsort(-logits_V, kind="stable")
    share = np.exp(logits_V[order] - logits_V.max())
    before = (np.cumsum(share) - share) / share.sum()
    kept = order[(before < top_p) & np.isfinite(logits_V[order])]
    return np.sort(kept if len(kept) else order[:1])


@pytest.mark.parametrize("layout", [WHOLE, SPLIT], ids=["whole", "split"])
@pytest.mark.parametrize("kind", LOGITS)
def test_the_nucleus_is_that_of_the_sorted_vocabulary(kind: str, layout: Layout) -> None:
    logits_BWV = LOGITS[kind].astype(np.float32)
    mesh = make_mesh(layout)
    with jax.set_mesh(mesh):
        placed_BWV = jax.device_put(logits_BWV, NamedSharding(mesh, layout.place("BWV")))
        cut = jax.jit(nucleus, static_argnums=(0, 2))
        for top_p in (0.0, 0.26, 0.71, 0.9, 0.999):
            masked_BWV = np.asarray(cut(layout, placed_BWV, top_p))
            for row, logits_V in zip(
                masked_BWV.reshape(-1, VOCAB), logits_BWV.reshape(-1, VOCAB), strict=True
            ):
                kept = np.flatnonzero(np.isfinite(row))
                np.testing.assert_array_equal(kept, reference(logits_V.astype(float), top_p))
                np.testing.assert_array_equal(row[kept], logits_V[kept])


def test_the_nucleus_of_sorted_logits_is_the_same() -> None:
    for logits_BWV in LOGITS.values():
        sorted_BWU = -np.sort(-logits_BWV.astype(np.float32))
        with jax.set_mesh(make_mesh(WHOLE)):
            for top_p in (0.0, 0.26, 0.9):
                masked_BWU = jax.jit(nucleus_of_sorted, static_argnums=(0, 2))(
                    WHOLE, sorted_BWU, top_p
                )
                for row, logits_V in zip(
                    np.asarray(masked_BWU).reshape(-1, VOCAB),
                    logits_BWV.reshape(-1, VOCAB),
                    strict=True,
                ):
                    assert np.isfinite(row).sum() == len(reference(logits_V, top_p))
