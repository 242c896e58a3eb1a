"""Caches the keys and values of prompts: a prompt with the same prefix computes only the rest.

Entries are entire prompts; SGLang (Zheng et al. 2024) and vLLM (Kwon et al. 2023) have blocks.
"""

from typing import NamedTuple

import numpy as np

from models.api import Cache

SHORTEST_CACHED = 65
"""Padded length from which prompts with their own prefill pass are cached."""


class CachedPrompt(NamedTuple):
    """Holds the tokens of a prompt that were fed to the model, and their keys and values."""

    tokens: np.ndarray
    length: int
    """Positions of the cache."""
    cache: Cache
    adapter: int = 0
    """The adapter that read the prompt; others give other keys and values."""

    def shared(self, tokens: np.ndarray) -> int:
        """Returns the length of the longest common prefix."""
        count = min(len(self.tokens), len(tokens))
        differ = np.flatnonzero(self.tokens[:count] != tokens[:count])
        return int(differ[0]) if len(differ) else count


class PrefixCache:
    """Holds the latest prompts, at most `limit` of them."""

    def __init__(self, limit: int):
        self.limit = limit
        self._prompts: list[CachedPrompt] = []

    def nearest(self, tokens: np.ndarray, adapter: int) -> CachedPrompt | None:
        """Returns the adapter's prompt with the longest common prefix; None if it has none."""
        prompts = (prompt for prompt in self._prompts if prompt.adapter == adapter)
        return max(prompts, key=lambda prompt: prompt.shared(tokens), default=None)

    def add(self, prompt: CachedPrompt) -> None:
        """Adds a prompt; removes its prefixes, and the oldest prompts beyond the limit."""
        others = (
            p for p in self._prompts
            if p.adapter != prompt.adapter or p.shared(prompt.tokens) < len(p.tokens)
        )  # fmt: skip
        self._prompts = [*others, prompt][-self.limit :] if self.limit else []

    def clear(self) -> None:
        """Removes all prompts, since new weights give other keys and values."""
        self._prompts = []
