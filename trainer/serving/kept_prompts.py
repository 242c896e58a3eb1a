"""Keeps keys and values of prompts: one that begins as an earlier one is read from there on."""

from typing import NamedTuple

import numpy as np

from models.api import Cache

SHORTEST_KEPT = 128
"""Padded length from which prompts are kept.  Each is read in a pass of its own."""


class KeptPrompt(NamedTuple):
    """Holds the tokens of a prompt that were fed to the model, and the cache of its row."""

    tokens: np.ndarray
    length: int
    """Positions of the cache."""
    cache: Cache

    def shared(self, tokens: np.ndarray) -> int:
        """Counts the tokens at the beginning of both."""
        count = min(len(self.tokens), len(tokens))
        differ = np.flatnonzero(self.tokens[:count] != tokens[:count])
        return int(differ[0]) if len(differ) else count


class KeptPrompts:
    """Keeps the latest prompts, at most `limit` of them.

    >>> prompts = KeptPrompts(limit=2)
    >>> for tokens in ([1, 2], [1, 2, 3], [4, 5]):
    ...     prompts.keep(KeptPrompt(np.array(tokens), 16, {}))
    >>> prompts.nearest(np.array([1, 2, 5])).tokens.tolist()
    [1, 2, 3]
    """

    def __init__(self, limit: int):
        self.limit = limit
        self._prompts: list[KeptPrompt] = []

    def nearest(self, tokens: np.ndarray) -> KeptPrompt | None:
        """Returns the prompt that shares the longest beginning with these tokens."""
        return max(self._prompts, key=lambda kept: kept.shared(tokens), default=None)

    def keep(self, prompt: KeptPrompt) -> None:
        """Keeps a prompt, in place of those that it begins with or of the oldest one."""
        others = (p for p in self._prompts if p.shared(prompt.tokens) < len(p.tokens))
        self._prompts = [*others, prompt][-self.limit :] if self.limit else []

    def clear(self) -> None:
        """Drops all, which other weights read."""
        self._prompts = []
