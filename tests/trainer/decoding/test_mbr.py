"""The sample that agrees most, by sacrebleu's own sentence chrF."""

import random

import pytest
from sacrebleu.metrics.chrf import CHRF

from trainer.decoding.requests import consensus, utilities

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


def test_of_equals_the_first_is_taken() -> None:
    assert consensus(["one", "two", "two", "one"]) == 0
    assert consensus(["xyz"]) == 0


def test_empty_samples_agree_with_each_other() -> None:
    assert utilities(["", "", "", "Katze"]) == [75, 75, 75, 25]
    assert consensus(["Katze", "", ""]) == 1
