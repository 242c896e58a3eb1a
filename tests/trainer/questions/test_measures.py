"""Exact match as the benchmarks define it, and the interval of a share."""

import pytest

from trainer.questions.questions import Normalization, Share, is_exact_match, normalize


@pytest.mark.parametrize(
    ("normalization", "text", "expected"),
    [
        ("squad", "The Bobby-Scott  Band.", "bobbyscott band"),
        ("triviaqa", "The Bobby-Scott  Band.", "bobby scott band"),
        ("squad", "an apple a day, theirs", "apple day theirs"),
        ("squad", "rock_n_roll", "rocknroll"),
        ("triviaqa", "rock_n_roll \u2018it\u2019", "rock n roll it"),
        ("squad", "\u2018it\u2019", "\u2018it\u2019"),
        ("squad", "Ä\u00a0Ö", "ä ö"),
    ],
)
def test_texts_are_normalized(normalization: Normalization, text: str, expected: str) -> None:
    assert normalize(text, normalization) == expected


def test_any_accepted_answer_is_right_and_no_answer_is_none() -> None:
    assert is_exact_match("the one!", ["two", "One"])
    assert not is_exact_match("one two", ["one", "two"])
    assert is_exact_match("The", ["A"])
    assert not is_exact_match("", ["A"])
    assert is_exact_match("6 geese a laying", ["6 geese a-laying"], "triviaqa")


def test_an_interval_is_wilsons() -> None:
    # scipy.stats.binomtest(k, n).proportion_ci(method="wilson")
    for right, total, low, high in (
        (3, 10, 0.10779126740630102, 0.6032218525388546),
        (0, 3, 0.0, 0.5614970317550454),
        (3610, 3610, 0.9989370151224211, 1.0),
    ):
        share = Share.of([True] * right + [False] * (total - right))
        assert share == pytest.approx((right / total, low, high, right, total), rel=1e-9)
