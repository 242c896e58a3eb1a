"""Contamination: the n-grams that occur, as a search of plain strings finds them."""

import random
import unicodedata

import pytest

from data import contamination
from data.contamination import MOST_DOCUMENTS, Overlap, overlaps


def words_of(text: str) -> list[str]:
    kept = "".join(x if x.isalnum() or x == "_" else " " for x in text.lower())
    return kept.split()


def expected(sentence: str, documents: list[list[str]], size: int) -> Overlap | None:
    words = words_of(sentence)
    if not words:
        return None
    size = min(size, len(words))
    texts = [[f" {' '.join(words_of(text))} " for text in texts] for texts in documents]
    starts, covered, chosen = 0, set[int](), set[int]()
    for start in range(len(words) - size + 1):
        ngram = f" {' '.join(words[start : start + size])} "
        places = [i for i, document in enumerate(texts) if any(ngram in text for text in document)]
        chosen.update(places[:MOST_DOCUMENTS])
        if places:
            starts += 1
            covered.update(range(start, start + size))
    share = starts / (len(words) - size + 1)
    return Overlap(share, len(covered) / len(words), sorted(chosen)[:MOST_DOCUMENTS])


def test_letters_with_their_marks_apart_are_the_same() -> None:
    composed, apart = (unicodedata.normalize(form, "über Zürich") for form in ("NFC", "NFD"))
    for sentence, text in ((composed, apart), (apart, composed)):
        assert overlaps([sentence], [[text]], 2) == [Overlap(1.0, 1.0, [0])]


@pytest.mark.parametrize("seed", range(20))
def test_overlaps_are_those_of_a_search_of_strings(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    draw = random.Random(seed)
    monkeypatch.setattr(contamination, "_WORDS_PER_SCAN", draw.choice((1, 20, 1 << 18)))

    def text() -> str:
        signs = ("", ",", ".", "! ", " -- ", "'")
        words = draw.choices(
            ("Kara", "kara", "tane", "ÜBER", "über", "x_1", "7"), k=draw.randint(0, 12)
        )
        return " ".join(word + draw.choice(signs) for word in words)

    sentences = [text() for _ in range(12)]
    documents = [
        [text() for _ in range(draw.randint(1, 2))] for _ in range(draw.choice((0, 9, 60)))
    ]
    for size in (1, 3, 5, 13):
        assert overlaps(sentences, documents, size) == [
            expected(sentence, documents, size) for sentence in sentences
        ]
