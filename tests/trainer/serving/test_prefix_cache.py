"""Prompts that a cache remembers."""

import numpy as np

from trainer.serving.prefix_cache import CachedPrompt, PrefixCache


def test_the_nearest_prompt_has_the_longest_common_prefix() -> None:
    prefixes = PrefixCache(limit=2)
    for tokens in ([1, 2], [1, 2, 3], [4, 5]):
        prefixes.add(CachedPrompt(np.array(tokens), 16, {}))
    nearest = prefixes.nearest(np.array([1, 2, 5]), adapter=0)
    assert nearest is not None and nearest.tokens.tolist() == [1, 2, 3]
