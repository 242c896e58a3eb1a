"""The sample that agrees most, by sacrebleu's own sentence chrF."""

import random

import pytest
from sacrebleu.metrics.chrf import CHRF

from trainer.decoding.mbr import consensus, utilities

WORDS = ["der", "Hund", "die", "Katze", "schläft", "frisst", "auf", "dem", "Sofa", "猫", "."]


def drawn(seed: int, count: int) -> list[str]:
    draw = random.Random(seed)
    texts = [" ".join(draw.choices(WORDS, k=draw.randint(0, 9))) for _ in range(count)]
    return [*texts, texts[0], texts[count // 2]]


@pytest.mark.parametrize("seed", range(5))
def test_the_choice_is_the_best_by_sacrebleu_against_the_others(seed: int) -> None:
    samples = [text for text in drawn(seed, 7) if text]
    score = CHRF().sentence_score
    means = [
        sum(score(sample, [other]).score for j, other in enumerate(samples) if j != i)
        for i, sample in enumerate(samples)
    ]
    assert samples[consensus(samples)] == samples[means.index(max(means))]
    whole = [(100 + mean) / len(samples) for mean in means]
    assert utilities(samples) == pytest.approx(whole)


def test_a_weight_stands_for_so_many_copies() -> None:
    samples = drawn(9, 6)
    weights = [1, 3, 0, 2, 5, 1, 1, 2]
    copies = [text for text, count in zip(samples, weights, strict=True) for _ in range(count)]
    by_text = dict(zip(copies, utilities(copies), strict=True))
    weighted = utilities(samples, [0.25 * weight for weight in weights])
    for text, utility in zip(samples, weighted, strict=True):
        assert utility == pytest.approx(by_text.get(text, utility))
    assert samples[consensus(samples, weights)] == copies[consensus(copies)]


def test_a_heavy_weight_decides() -> None:
    samples = ["ein Hund", "ein Hund", "zwei Katzen"]
    assert consensus(samples) == 0
    assert consensus(samples, [0.1, 0.1, 0.8]) == 2


def test_of_equals_the_first_is_taken() -> None:
    assert consensus(["one", "two", "two", "one"]) == 0
    assert consensus(["xyz"]) == 0


def test_empty_samples_agree_with_each_other() -> None:
    assert utilities(["", "", "", "Katze"]) == [75, 75, 75, 25]
    assert consensus(["Katze", "", ""]) == 1
