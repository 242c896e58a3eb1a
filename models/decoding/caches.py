"""Manages the caches of the hypotheses of a sentence: one for all, or one for each."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from layouts.axes import letters_of
from layouts.layout import Layout
from layouts.shards import spec_of
from models.api import Cache

ModelStep = Callable[[Cache, Array, Array, Array, Array], tuple[Cache, Array]]
"""`Decodable.step` with the prepared weights."""


def repeat(layout: Layout, x: Array, width: int, axes: str) -> Array:
    """Repeats x for each hypothesis, along a new second axis."""
    shape = (x.shape[0], width, *x.shape[1:])
    return layout.broadcast_in_dim(x, shape, (0, *range(2, len(shape))), axes)


@dataclasses.dataclass(frozen=True)
class HypothesisCaches:
    """Assigns slots to the tokens of each hypothesis, and feeds them to the model.

    A cache holds the prompt, then one slot per step and hypothesis, then the suffix of each
    hypothesis.
    """

    layout: Layout
    flat: bool
    """Whether all hypotheses of a sentence share one cache.  Each then sees its own ancestors; if
    these change, only the mask is reordered (GShard, Lepikhin et al. 2020, appendix A.1).
    Otherwise each has a cache, which moves when a hypothesis continues another."""
    rows: int
    width: int
    prompt: int
    new_tokens: int
    suffix: int
    model_step: ModelStep

    @property
    def per_cache(self) -> int:
        """Returns the number of hypotheses in a cache."""
        return self.width if self.flat else 1

    def expand(self, cache: Cache) -> Cache:
        """Expands the caches of sentences to caches of their hypotheses."""

        def repeated(x: Array, axes: str) -> Array:
            return self.merge(repeat(self.layout, x, self.width, axes), axes)

        return cache if self.flat else change_arrays(cache, repeated)

    def reorder(self, cache: Cache, mask_BWM: Array, parents_BW: Array) -> tuple[Cache, Array]:
        """Returns the caches and the mask of hypotheses that continue these parents."""
        if self.flat:
            return cache, self.layout.take_along_axis(mask_BWM, parents_BW, "BWM")

        def moved(x: Array, axes: str) -> Array:
            x = self.layout.reshape(x, (self.rows, self.width, *x.shape[1:]), axes)
            return self.merge(self.layout.take_along_axis(x, parents_BW, axes), axes)

        return change_arrays(cache, moved, with_sources=False), mask_BWM

    def merge(self, x: Array, axes: str) -> Array:
        """Merges the second axis, the hypotheses, into the length if `flat`, else into the rows."""
        rows, width, *rest = x.shape
        shape = (rows, width * rest[0], *rest[1:]) if self.flat else (rows * width, *rest)
        return self.layout.reshape(x, shape, axes[0] + axes[2:])

    @property
    def suffix_index(self) -> int:
        """Returns the first slot of the suffixes."""
        return self.prompt + self.per_cache * self.new_tokens

    @property
    def cache_length(self) -> int:
        return self.suffix_index + self.per_cache * self.suffix

    def step(
        self, cache: Cache, mask_BWM: Array, last_BW: Array, position_BW: Array, step: Array
    ) -> tuple[Cache, Array, Array]:
        """Feeds one token of each hypothesis; returns cache, mask and logits."""
        cache_index = self.prompt + step * self.per_cache
        shape = (self.rows, self.width, self.cache_length)
        slot_BWM, hypothesis_BWM = (self.layout.iota("BWM", shape, letter) for letter in "MW")
        mask_BWM = mask_BWM | (slot_BWM == cache_index + hypothesis_BWM % self.per_cache)
        tokens_BWL, positions_BWL = last_BW[:, :, None], position_BW[:, :, None]
        mask_BWLM = mask_BWM[:, :, None]
        cache, logits_BWLV = self.feed(cache, tokens_BWL, positions_BWL, mask_BWLM, cache_index)
        return cache, mask_BWM, logits_BWLV[:, :, 0]

    def feed_suffix(
        self, cache: Cache, mask_BWM: Array, lengths_BW: Array, tokens_BWL: Array,
        positions_BWL: Array,
    ) -> Array:  # fmt: skip
        """Feeds the suffix after each text in one pass; returns the logits after each token.

        Each token of a suffix sees its prompt, its text and the suffix up to itself.
        """
        shape = (self.rows, self.width, self.suffix, self.cache_length)
        slot_BWLM, hypothesis_BWLM, position_BWLM = (
            self.layout.iota("BWLM", shape, letter) for letter in "MWL"
        )
        step_BWLM = (slot_BWLM - self.prompt) // self.per_cache  # negative in the prompt
        first_BWLM = self.suffix_index + hypothesis_BWLM % self.per_cache * self.suffix
        text_BWLM = mask_BWM[:, :, None, :] & (step_BWLM < lengths_BW[:, :, None, None])
        suffix_BWLM = (first_BWLM <= slot_BWLM) & (slot_BWLM <= first_BWLM + position_BWLM)
        mask_BWLM, index = text_BWLM | suffix_BWLM, jnp.int32(self.suffix_index)
        return self.feed(cache, tokens_BWL, positions_BWL, mask_BWLM, index)[1]

    def feed(
        self, cache: Cache, tokens_BWL: Array, positions_BWL: Array, mask_BWLM: Array,
        cache_index: Array,
    ) -> tuple[Cache, Array]:  # fmt: skip
        """Feeds tokens of each hypothesis; returns the cache and the logits after each token."""
        tokens_BL, positions_BL = self.merge(tokens_BWL, "BWL"), self.merge(positions_BWL, "BWL")
        mask_BLM = self.merge(mask_BWLM, "BWLM")
        cache, logits_BLV = self.model_step(cache, tokens_BL, positions_BL, mask_BLM, cache_index)
        shape = (*tokens_BWL.shape, logits_BLV.shape[-1])
        return cache, self.layout.reshape(logits_BLV, shape, "BWLV")


def change_arrays(
    cache: Cache, change: Callable[[Array, str], Array], *, with_sources: bool = True
) -> Cache:
    """Applies `change` to the arrays of a cache and their letters with W, to each layer separately.

    The arrays of a source are equal for all hypotheses of a sentence, so they need no reordering.
    Axes that are not split get lowercase letters, to stay so even if the layout has rules for
    common axes with the same letters.
    """

    def changed(path: tuple[jax.tree_util.DictKey, ...], x: Array) -> Array:
        name = path[-1].key
        letters = letters_of(name)
        places = zip(letters[1:], spec_of(x)[1 - len(letters) :], strict=True)
        axes = "BW" + "".join(n if entry else n.lower() for n, entry in places)
        if name.startswith("source") and not with_sources:
            return x
        if x.ndim > len(letters):
            return jax.lax.map(lambda layer: change(layer, axes), x)
        return change(x, axes)

    return jax.tree.map_with_path(changed, cache)
