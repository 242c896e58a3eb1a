"""Parts of beam search: the length penalty, and lists of the best."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layouts.mesh import make_mesh
from models.decoding.beam import Beam, merge_best
from models.decoding.generate import DecodeInputs, DecodeOutput
from tests.toys import WHOLE


@pytest.mark.parametrize(
    ("beam", "divisors"),
    [
        (Beam(alpha=0.0), [1, 1, 1]),
        (Beam(alpha=1.0), [1, 7 / 6, 13 / 6]),
        (Beam(alpha=2.0, penalty="power"), [1, 4, 64]),
    ],
    ids=str,
)
def test_the_length_penalty_is_a_power_of_the_length(beam: Beam, divisors: list[float]) -> None:
    np.testing.assert_allclose(beam.divisor(jnp.array([1, 2, 8])), divisors, rtol=1e-6)


def test_two_lists_merge_to_the_best_of_both() -> None:
    def texts(*scores: float) -> DecodeOutput:
        score_BW = jnp.array([scores])
        tokens_BWT = jnp.round(-10 * jnp.maximum(score_BW, -9))[:, :, None].astype(jnp.int32)
        return DecodeOutput(tokens_BWT, score_BW, 2 * score_BW)

    with jax.set_mesh(make_mesh(WHOLE)):
        best = jax.jit(merge_best, static_argnums=0)(
            WHOLE, texts(-0.5, -2.0, -jnp.inf), texts(-1.0, -0.1, -3.0, -jnp.inf)
        )
    np.testing.assert_allclose(best.score_BW, [[-0.1, -0.5, -1.0]])
    np.testing.assert_allclose(best.log_probability_BW, [[-0.2, -1.0, -2.0]])
    np.testing.assert_array_equal(best.tokens_BWT[0, :, 0], [1, 5, 10])


def test_hypotheses_that_may_all_end_leave_others_to_continue() -> None:
    beam, stop_ids = Beam(width=2), (1, 2, 3)
    lengths_B = jnp.zeros(1, jnp.int32)
    inputs = DecodeInputs(
        lengths_B[:, None], lengths_B, lengths_B, lengths_B + 5, stop_ids=stop_ids
    )
    logits_BWV = jnp.tile(jnp.array([-9.0, 3.0, 3.0, 3.0, -1.0, 0.0, -9.0, -9.0]), (1, 2, 1))

    @jax.jit
    def first_tokens(logits_BWV: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        start = beam.start(WHOLE, inputs, new_tokens=4)
        state, token_BW, _ = beam.advance(WHOLE, start, logits_BWV, inputs, jnp.int32(0))
        return token_BW, state.score_BW, state.count_B

    with jax.set_mesh(make_mesh(WHOLE)):
        token_BW, score_BW, count_B = first_tokens(logits_BWV)
    assert token_BW.tolist() == [[5, 4]] and np.isfinite(score_BW).all()
    assert count_B.tolist() == [2]
