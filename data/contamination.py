"""Finds n-grams of test sentences in a text, as published measures of contamination do.

Words are compared without case and punctuation.  A sentence shorter than an n-gram counts as one
n-gram (GPT-3: Brown et al. 2020, appendix C).
"""

import bisect
import re
import unicodedata
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

MOST_DOCUMENTS = 10
"""How many documents are kept for an n-gram: the first ones that contain it."""
_WORD = re.compile(r"\w+")
_WORDS_PER_SCAN = 1 << 18
_KEY_BITS = 22
_FACTOR = 0x9E3779B97F4A7C15  # of a polynomial hash of words, modulo 2 ** 64


class Overlap(NamedTuple):
    """Holds how much of a sentence occurs in a text."""

    ngrams: float
    """Share of its n-grams that occur in the text."""
    words: float
    """Share of its words that are in one of these n-grams."""
    documents: list[int]
    """The first documents that contain one of these n-grams."""


def overlaps(
    sentences: Sequence[str], documents: Iterable[Sequence[str]], size: int
) -> list[Overlap | None]:
    """Searches documents, each some texts, for n-grams of the sentences; None without words."""
    tests = [_words(sentence) for sentence in sentences]
    hits: dict[str, list[int]] = {ngram: [] for test in tests for ngram in _ngrams(test, size)}
    tables = {min(size, len(test) - 1): np.zeros(1 << _KEY_BITS, bool) for test in tests}
    for length, keys in _keys([word for test in tests for word in test], tables):
        tables[length][keys] = True
    words, starts, first = list[str](), list[int](), 0

    def scan() -> None:
        for length, keys in _keys(words, tables):
            for start in np.flatnonzero(tables[length][keys]).tolist():
                document = first + bisect.bisect_right(starts, start) - 1
                known = hits.get(" ".join(words[start : start + length]), [document])
                if known[-1:] != [document] and len(known) < MOST_DOCUMENTS:
                    known.append(document)

    for texts in documents:
        starts.append(len(words))
        words += [word for text in texts for word in _words(text)]
        if len(words) > _WORDS_PER_SCAN:
            scan()
            first += len(starts)
            words.clear()
            starts.clear()
    scan()
    return [_overlap(test, [hits[x] for x in _ngrams(test, size)], size) for test in tests]


def _words(text: str) -> list[str]:
    """Returns the words of a text and an empty word, so that no n-gram spans two texts."""
    return [*_WORD.findall(unicodedata.normalize("NFC", text.lower())), ""]


def _ngrams(words: Sequence[str], size: int) -> list[str]:
    size = min(size, len(words) - 1)
    return [" ".join(words[i : i + size]) for i in range(len(words) - size)] if size else []


def _keys(words: Sequence[str], sizes: Collection[int]) -> Iterator[tuple[int, np.ndarray]]:
    """Yields each size with short hashes of all n-grams of it, which may agree by chance."""
    hashes = np.fromiter(map(hash, words), np.int64, len(words)).astype(np.uint64)
    keys = np.zeros(len(words) + 1, np.uint64)
    for size in range(1, min(max(sizes, default=0), len(words)) + 1):
        keys = keys[:-1] * np.uint64(_FACTOR) + hashes[size - 1 :]  # of `size` words from each on
        if size in sizes:
            yield size, keys >> np.uint64(64 - _KEY_BITS)


def _overlap(words: Sequence[str], hits: Sequence[list[int]], size: int) -> Overlap | None:
    if not hits:
        return None
    occurs = np.array([*map(bool, hits)])
    is_covered = np.convolve(occurs, np.ones(min(size, len(words) - 1))) > 0
    documents = sorted({document for of_ngram in hits for document in of_ngram})
    return Overlap(float(occurs.mean()), float(is_covered.mean()), documents[:MOST_DOCUMENTS])
