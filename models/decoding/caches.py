"""Keeps keys and values of the hypotheses of a sentence, in one cache or in one for each."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from layouts.axes import letters_of
from layouts.layout import Layout
from models.api import Cache, Step

Array = jax.Array


def repeat(layout: Layout, x: Array, width: int, axes: str) -> Array:
    """Repeats x for each hypothesis; they become the second axis."""
    shape = (x.shape[0], width, *x.shape[1:])
    return layout.broadcast_in_dim(x, shape, (0, *range(2, len(shape))), axes)


class SharedCache:
    """Keeps one cache for all hypotheses of a sentence, with a slot for each at each step.

    Each sees its own ancestors; when they change, the mask is rearranged and not the cache.  GShard
    (Lepikhin et al. 2020), appendix A.1.
    """

    def __init__(
        self, layout: Layout, rows: int, width: int, prompt: int, new_tokens: int, suffix: int = 0
    ):
        self.layout, self.rows, self.width, self.prompt = layout, rows, width, prompt
        self.suffix_index = prompt + width * new_tokens
        self.cache_length = self.suffix_index + width * suffix

    def expand(self, cache: Cache) -> Cache:
        return cache

    def step(
        self, model_step: Step, cache: Cache, mask_BWM: Array, last_BW: Array, position_BW: Array,
        step: Array,
    ) -> tuple[Cache, Array, Array]:  # fmt: skip
        cache_index = self.prompt + step * self.width
        shape = (self.rows, self.width, self.cache_length)
        slot_BWM, hypothesis_BWM = (self.layout.iota("BWM", shape, letter) for letter in "MW")
        mask_BWM = mask_BWM | (slot_BWM == cache_index + hypothesis_BWM)
        cache, logits_BWV = model_step(cache, last_BW, position_BW, mask_BWM, cache_index)
        return cache, mask_BWM, logits_BWV

    def reorder(self, cache: Cache, mask_BWM: Array, parents_BW: Array) -> tuple[Cache, Array]:
        return cache, self.layout.take_along_axis(mask_BWM, parents_BW, "BWM")

    def feed_suffix(
        self, model_step: Step, cache: Cache, mask_BWM: Array, lengths_BW: Array,
        tokens_BWL: Array, positions_BWL: Array,
    ) -> Array:  # fmt: skip
        """Feeds some tokens behind each text in one pass; returns the logits after each."""
        suffix = tokens_BWL.shape[2]
        mask_BWLM = suffix_mask(
            self.layout, mask_BWM, lengths_BW, suffix, (self.prompt, self.width),
            (self.suffix_index, suffix),
        )  # fmt: skip
        length = self.width * suffix
        tokens_BL, positions_BL, mask_BLM = (
            self.layout.reshape(x, (self.rows, length, *x.shape[3:]), axes)
            for x, axes in ((tokens_BWL, "BL"), (positions_BWL, "BL"), (mask_BWLM, "BLM"))
        )
        index = jnp.int32(self.suffix_index)
        _, logits_BLV = model_step(cache, tokens_BL, positions_BL, mask_BLM, index)
        shape = (*tokens_BWL.shape, logits_BLV.shape[-1])
        return self.layout.reshape(logits_BLV, shape, "BWLV")


class SeparateCaches:
    """Keeps a cache for each hypothesis, which moves when a hypothesis continues another."""

    def __init__(
        self, layout: Layout, rows: int, width: int, prompt: int, new_tokens: int, suffix: int = 0
    ):
        self.layout, self.rows, self.width, self.prompt = layout, rows, width, prompt
        self.suffix_index = prompt + new_tokens
        self.cache_length = self.suffix_index + suffix

    def expand(self, cache: Cache) -> Cache:
        def repeated(x: Array, axes: str) -> Array:
            axes = "BW" + axes[1:]
            return self._merge(repeat(self.layout, x, self.width, axes), axes)

        return self._by_name(cache, repeated)

    def step(
        self, model_step: Step, cache: Cache, mask_BWM: Array, last_BW: Array, position_BW: Array,
        step: Array,
    ) -> tuple[Cache, Array, Array]:  # fmt: skip
        cache_index = self.prompt + step
        shape = (self.rows, self.width, self.cache_length)
        mask_BWM = mask_BWM | (self.layout.iota("BWM", shape, "M") == cache_index)
        last, position, mask = (
            jnp.expand_dims(self._merge(x, axes), 1)
            for x, axes in ((last_BW, "BW"), (position_BW, "BW"), (mask_BWM, "BWM"))
        )
        cache, logits_BLV = model_step(cache, last, position, mask, cache_index)
        return cache, mask_BWM, self._split(logits_BLV[:, 0], "BWV")

    def reorder(self, cache: Cache, mask_BWM: Array, parents_BW: Array) -> tuple[Cache, Array]:
        def moved(x: Array, axes: str) -> Array:
            axes = "BW" + axes[1:]
            x = self.layout.take_along_axis(self._split(x, axes), parents_BW, axes)
            return self._merge(x, axes)

        return self._by_name(cache, moved, but="source"), mask_BWM

    def feed_suffix(
        self, model_step: Step, cache: Cache, mask_BWM: Array, lengths_BW: Array,
        tokens_BWL: Array, positions_BWL: Array,
    ) -> Array:  # fmt: skip
        """Feeds some tokens behind each text in one pass; returns the logits after each."""
        mask_BWLM = suffix_mask(
            self.layout, mask_BWM, lengths_BW, tokens_BWL.shape[2], (self.prompt, 1),
            (self.suffix_index, 0),
        )  # fmt: skip
        tokens_BL, positions_BL, mask_BLM = (
            self._merge(x, axes)
            for x, axes in ((tokens_BWL, "BWL"), (positions_BWL, "BWL"), (mask_BWLM, "BWLM"))
        )
        index = jnp.int32(self.suffix_index)
        _, logits_BLV = model_step(cache, tokens_BL, positions_BL, mask_BLM, index)
        return self._split(logits_BLV, "BWLV")

    def _by_name(
        self, cache: Cache, change: Callable[[Array, str], Array], but: str = "-"
    ) -> Cache:
        """Changes the arrays of a cache, given their letters; stacked layers one after another."""

        def changed(path: tuple[jax.tree_util.DictKey, ...], x: Array) -> Array:
            name = path[-1].key
            axes = letters_of(name)
            if name.startswith(but):
                return x
            if x.ndim > len(axes):
                return jax.lax.map(lambda layer: change(layer, axes), x)
            return change(x, axes)

        return jax.tree.map_with_path(changed, cache)

    def _merge(self, x: Array, axes: str) -> Array:
        """Merges hypotheses, the second of these axes, into rows."""
        shape = (x.shape[0] * x.shape[1], *x.shape[2:])
        return self.layout.reshape(x, shape, axes[0] + axes[2:])

    def _split(self, x: Array, axes: str) -> Array:
        """Splits rows into the hypotheses of their sentences."""
        shape = (self.rows, self.width, *x.shape[1:])
        return self.layout.reshape(x, shape, axes)


def suffix_mask(
    layout: Layout,
    mask_BWM: Array,
    lengths_BW: Array,
    suffix: int,
    texts: tuple[int, int],
    suffixes: tuple[int, int],
) -> Array:
    """Lets each token of a suffix see its prompt, its text and the suffix up to itself.

    texts has the first slot behind the prompt and the slots of a step; suffixes the first slot of
    the first suffix and how many slots lie between those of two hypotheses.
    """
    shape = (*mask_BWM.shape[:2], suffix, mask_BWM.shape[2])
    slot_BWLM, hypothesis_BWLM, place_BWLM = (
        layout.iota("BWLM", shape, letter) for letter in "MWL"
    )
    step_BWLM = (slot_BWLM - texts[0]) // texts[1]  # negative in the prompt
    first_BWLM = suffixes[0] + hypothesis_BWLM * suffixes[1]
    text_BWLM = mask_BWM[:, :, None, :] & (step_BWLM < lengths_BW[:, :, None, None])
    suffix_BWLM = (first_BWLM <= slot_BWLM) & (slot_BWLM <= first_BWLM + place_BWLM)
    return text_BWLM | suffix_BWLM


def hypothesis_cache(
    layout: Layout, *, flat: bool, rows: int, width: int, prompt: int, new_tokens: int, suffix: int
) -> SharedCache | SeparateCaches:
    """Returns the arrangement of caches for a search."""
    return (SharedCache if flat else SeparateCaches)(
        layout, rows, width, prompt, new_tokens, suffix
    )
