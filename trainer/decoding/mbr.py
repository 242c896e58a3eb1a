"""Chooses among samples the one that most agrees with all: the minimum Bayes risk under chrF."""

import itertools
from collections import Counter
from collections.abc import Sequence

from sacrebleu.metrics.chrf import CHRF
from sacrebleu.metrics.helpers import extract_all_char_ngrams

CHRF2 = CHRF()
SAME = 100.0  # what a text scores against itself

Ngrams = list[Counter[str]]  # counts of the character n-grams of a text, by length


def consensus(samples: Sequence[str], weights: Sequence[float] | None = None) -> int:
    """Returns the index of the sample with the highest utility; of equals, the first."""
    of_samples = utilities(samples, weights)
    return of_samples.index(max(of_samples))


def utilities(samples: Sequence[str], weights: Sequence[float] | None = None) -> list[float]:
    """Returns the mean sentence chrF of each sample against all, in percent.

    Each counts itself as full agreement, which without weights leaves the order as the mean
    against the others has it.  Weights, such as the model's probabilities, are not negative and
    need not add up to one; with them this is the expected gain of Shankar Kumar and William Byrne,
    Minimum Bayes-Risk Decoding for Statistical Machine Translation, 2004.

    >>> [round(utility) for utility in utilities(["a cat", "a cat", "a dog"])]
    [69, 69, 38]
    """
    weights = [1.0] * len(samples) if weights is None else weights
    masses = dict.fromkeys(samples, 0.0)  # each distinct text once
    for text, weight in zip(samples, weights, strict=True):
        assert weight >= 0
        masses[text] += weight
    whole = sum(masses.values())
    assert whole > 0
    # The weighted sum of each text's chrF against all texts, itself among them.
    totals = {text: SAME * mass for text, mass in masses.items()}
    ngrams = {text: extract_all_char_ngrams(text, CHRF2.char_order) for text in masses}
    for text, other in itertools.combinations(masses, 2):
        there, back = _both_ways(ngrams[text], ngrams[other])
        totals[text] += masses[other] * there
        totals[other] += masses[text] * back
    return [totals[text] / whole for text in samples]


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
