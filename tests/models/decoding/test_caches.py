"""Caches of hypotheses: what the tokens of a suffix see in them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layouts.layout import Layout
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


def test_axes_of_a_part_stay_whole_whatever_common_axes_have_their_letters() -> None:
    layout = Layout(mesh="x:2,y:2", rules="batch:x;kernel_width:y")
    caches = HypothesisCaches(
        layout, False, ROWS, WIDTH, PROMPT, NEW, SUFFIX, lambda *_: ({}, None)
    )
    rotated = np.arange(ROWS * 5 * 4.0).reshape(ROWS, 5, 4)
    parents = np.array([[2, 0, 0], [1, 1, 2]])
    with jax.set_mesh(make_mesh(layout)):
        x_BMp = layout.reshard(jnp.asarray(rotated), "BMp")
        cache = jax.jit(caches.expand)({"rotated_BMP": x_BMp})
        numbered = jnp.arange(0.0, ROWS * WIDTH).reshape(-1, 1, 1) + cache["rotated_BMP"] * 10
        mask_BWM = layout.reshard(jnp.ones((ROWS, WIDTH, 5), bool), "BWM")
        moved, _ = jax.jit(caches.reorder)(
            {"rotated_BMP": numbered}, mask_BWM, layout.reshard(jnp.asarray(parents), "BW")
        )
    assert (
        cache["rotated_BMP"].sharding.spec
        == moved["rotated_BMP"].sharding.spec
        == x_BMp.sharding.spec
    )
    np.testing.assert_array_equal(cache["rotated_BMP"], rotated.repeat(WIDTH, axis=0))
    of_parents = (np.arange(ROWS)[:, None] * WIDTH + parents).reshape(-1, 1, 1)
    np.testing.assert_array_equal(
        moved["rotated_BMP"], of_parents + 10 * rotated.repeat(WIDTH, axis=0)
    )
