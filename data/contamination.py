"""Finds n-grams of test sentences in a text, for published measures of contamination.

Words are compared without case and punctuation.  Of a sentence that is shorter than an n-gram, all
words make one (GPT-3: Brown et al. 2020, appendix C).
"""

import bisect
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

MOST_DOCUMENTS = 5
"""The first documents that have an n-gram; no others are kept."""
_WORD = re.compile(r"\w+")
_WORDS_PER_SCAN = 1 << 18
_KEY_BITS = 22
_FACTOR = 0x9E3779B97F4A7C15  # of a polynomial of the words' hashes, modulo 2 ** 64


class Overlap(NamedTuple):
    """Says how much of a sentence occurs in a text."""

    ngrams: float
    """Share of its n-grams that occur."""
    words: float
    """Share of its words that are in one of these."""
    documents: list[int]
    """The first documents that have one of these."""


def overlaps(
    sentences: Sequence[str], documents: Iterable[Sequence[str]], size: int
) -> list[Overlap | None]:
    """Searches documents, each of some texts, for the n-grams of sentences; None without words."""
    tests = [_WORD.findall(sentence.lower()) for sentence in sentences]
    places: dict[str, list[int]] = {ngram: [] for words in tests for ngram in _ngrams(words, size)}
    tables = defaultdict[int, np.ndarray](lambda: np.zeros(1 << _KEY_BITS, bool))
    for words in map(str.split, places):
        tables[len(words)][_key(words) >> (64 - _KEY_BITS)] = True
    words, starts, first = list[str](), list[int](), 0

    def scan() -> None:
        for start, ngram in _matches(words, tables):
            document = first + bisect.bisect_right(starts, start) - 1
            known = places.get(ngram, [document])
            if document not in known and len(known) < MOST_DOCUMENTS:
                known.append(document)

    for texts in documents:
        starts.append(len(words))
        for text in texts:
            words += [*_WORD.findall(text.lower()), ""]  # no n-gram goes on in the next text
        if len(words) > _WORDS_PER_SCAN:
            scan()
            first += len(starts)
            words.clear()
            starts.clear()
    scan()
    return [_overlap(words, places, size) if words else None for words in tests]


def _ngrams(words: Sequence[str], size: int) -> list[str]:
    size = min(size, len(words))
    return [" ".join(words[i : i + size]) for i in range(len(words) - size + 1)] if words else []


def _key(words: Iterable[str]) -> int:
    key = 0
    for word in words:
        key = (key * _FACTOR + hash(word)) % (1 << 64)
    return key


def _matches(words: Sequence[str], tables: Mapping[int, np.ndarray]) -> Iterator[tuple[int, str]]:
    """Yields the start and the text of each n-gram whose key the table of its length has."""
    hashes = np.fromiter(map(hash, words), np.int64, len(words)).astype(np.uint64)
    keys = np.zeros(len(words) + 1, np.uint64)
    for size in range(1, min(max(tables, default=0), len(words)) + 1):
        keys = keys[:-1] * np.uint64(_FACTOR) + hashes[size - 1 :]  # of the words from each one on
        if size in tables:
            may_occur = tables[size][keys >> np.uint64(64 - _KEY_BITS)]
            for start in np.flatnonzero(may_occur).tolist():
                yield start, " ".join(words[start : start + size])


def _overlap(words: Sequence[str], places: Mapping[str, list[int]], size: int) -> Overlap:
    ngrams = _ngrams(words, size)
    is_covered, documents = np.zeros(len(words), bool), set[int]()
    for start, ngram in enumerate(ngrams):
        documents.update(places[ngram])
        is_covered[start : start + size] |= bool(places[ngram])
    share = sum(bool(places[ngram]) for ngram in ngrams) / len(ngrams)
    return Overlap(share, float(is_covered.mean()), sorted(documents)[:MOST_DOCUMENTS])
