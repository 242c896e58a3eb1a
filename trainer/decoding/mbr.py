"""Chooses among samples the one that most agrees with all: the minimum Bayes risk under chrF."""

import itertools
from collections import Counter
from collections.abc import Sequence

from sacrebleu.metrics.chrf import CHRF
from sacrebleu.metrics.helpers import extract_all_char_ngrams

CHRF2 = CHRF()
SAME = 100.0  # what a text scores against itself

Ngrams = list[Counter[str]]  # counts of the character n-grams of a text, by length


def consensus(samples: Sequence[str]) -> int:
    """Returns the index of the sample with the highest utility; of equals, the first."""
    of_samples = utilities(samples)
    return of_samples.index(max(of_samples))


def utilities(samples: Sequence[str]) -> list[float]:
    """Returns the mean sentence chrF of each sample against all, in percent.

    Each counts itself as full agreement, which orders them as the mean against the others does.

    >>> [round(utility) for utility in utilities(["a cat", "a cat", "a dog"])]
    [69, 69, 38]
    """
    counts = Counter(samples)
    # The sum of each text's chrF against all texts, itself among them.
    totals = {text: SAME * count for text, count in counts.items()}
    ngrams = {text: extract_all_char_ngrams(text, CHRF2.char_order) for text in counts}
    for text, other in itertools.combinations(counts, 2):
        there, back = _both_ways(ngrams[text], ngrams[other])
        totals[text] += counts[other] * there
        totals[other] += counts[text] * back
    return [totals[text] / len(samples) for text in samples]


def _both_ways(hypothesis: Ngrams, reference: Ngrams) -> tuple[float, float]:
    """Computes chrF of two texts against each other, both ways, from one count of matches.

    sacrebleu's `sentence_score` counts all n-grams of both texts in each call, which for 16
    samples takes 6 times as long.
    """
    there: list[int] = []
    back: list[int] = []
    for first, second in zip(hypothesis, reference, strict=True):
        in_first, in_second, matches = CHRF2._get_match_statistics(first, second)
        there += [in_first, in_second, matches]
        back += [in_second, in_first, matches]
    return CHRF2._compute_f_score(there), CHRF2._compute_f_score(back)
