"""Caches of hypotheses: what the tokens of a suffix see in them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layouts.mesh import make_mesh
from models.decoding.caches import HypothesisCaches
from tests.toys import WHOLE

ROWS, WIDTH, PROMPT, NEW, SUFFIX = 2, 3, 5, 4, 2
PROMPTS = [5, 2]
LENGTHS = np.array([[0, 4, 1], [2, 3, 0]])


@pytest.mark.parametrize("flat", [True, False])
def test_a_suffix_sees_its_prompt_its_text_and_itself(flat: bool) -> None:
    """A text of n tokens was fed in n steps: the last of the prompt, and all of its but one."""
    masks = []

    def model_step(
        cache: dict, tokens_BL: jax.Array, positions_BL: jax.Array, mask_BLM: jax.Array,
        cache_index: jax.Array,
    ) -> tuple[dict, jax.Array]:  # fmt: skip
        masks.append((mask_BLM, int(cache_index)))
        return cache, jax.nn.one_hot(tokens_BL, 7)

    caches = HypothesisCaches(WHOLE, flat, ROWS, WIDTH, PROMPT, NEW, SUFFIX, model_step)
    slots = np.arange(caches.cache_length)
    step_WM = (slots - PROMPT) // WIDTH if flat else slots - PROMPT
    hypothesis_WM = (slots - PROMPT) % WIDTH if flat else np.arange(WIDTH)[:, None]
    loop_WM = (step_WM >= 0) & (step_WM < NEW) & (hypothesis_WM == np.arange(WIDTH)[:, None])
    fed_BWM = (slots < np.array(PROMPTS)[:, None, None]) | loop_WM
    tokens_BWL = jnp.arange(ROWS * WIDTH * SUFFIX).reshape(ROWS, WIDTH, SUFFIX) % 7
    with jax.set_mesh(make_mesh(WHOLE)):
        logits_BWLV = caches.feed_suffix(
            {}, jnp.asarray(fed_BWM), jnp.asarray(LENGTHS), tokens_BWL, tokens_BWL
        )
    np.testing.assert_array_equal(logits_BWLV.argmax(-1), tokens_BWL)
    [(mask, index)] = masks
    mask_BWLM = np.asarray(mask).reshape(ROWS, WIDTH, SUFFIX, -1)
    for row, hypothesis, place in np.ndindex(ROWS, WIDTH, SUFFIX):
        steps = range(LENGTHS[row, hypothesis])
        first = index + hypothesis * SUFFIX if flat else index
        visible = {
            *range(PROMPTS[row]),
            *(PROMPT + (step * WIDTH + hypothesis if flat else step) for step in steps),
            *range(first, first + place + 1),
        }
        assert set(np.flatnonzero(mask_BWLM[row, hypothesis, place])) == visible
