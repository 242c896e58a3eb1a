"""Cleaning: each reason drops its pairs and no others, from training alone."""

from collections import Counter

import pytest

from configs.errors import UserError
from data.sources.clean import Clean
from data.sources.pairs import Pair

GOOD = [Pair("guten Tag", "good day"), Pair("ja", "yes"), Pair("a\u2028b", "c")]
BAD = {
    "an empty side": Pair("  ", "nothing"),
    "control characters": Pair("a\x07b", "bell"),
    "not UTF-8": Pair("na\udcefve", "naive"),
    "a repeat": GOOD[0],
    "above max_characters": Pair("x" * 41, "x" * 30),
    "below min_characters": Pair("a", "b"),
    "above max_ratio": Pair("abc", "a" * 13),
}


def kept(clean, pairs, split="train"):
    dropped = Counter()
    return list(clean.kept(pairs, split, dropped)), dropped


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({}, "an empty side"),
        ({"drops_control_characters": True}, "control characters"),
        ({"drops_invalid_utf8": True}, "not UTF-8"),
        ({"drops_duplicates": True}, "a repeat"),
        ({"max_characters": 40}, "above max_characters"),
        ({"max_ratio": 4}, "above max_ratio"),
    ],
)
def test_each_setting_drops_what_it_says(settings, reason):
    clean = Clean(drops_empty=reason == "an empty side", **settings)
    actual, dropped = kept(clean, [*GOOD, BAD[reason]])
    assert actual == GOOD
    assert dropped == {reason: 1}
    assert kept(clean, GOOD) == (GOOD, {reason: 0})
    lenient = Clean(drops_empty=False)
    if reason != "not UTF-8":  # which reading refuses, unless it is to be dropped
        assert kept(lenient, [*GOOD, BAD[reason]]) == ([*GOOD, BAD[reason]], {})


def test_too_short_counts_the_shorter_side_without_spaces_around_it():
    pairs = [Pair("abc", "abc"), Pair("abc", " ab "), BAD["below min_characters"]]
    assert kept(Clean(drops_empty=False, min_characters=3), pairs) == (
        pairs[:1],
        {"below min_characters": 2},
    )


def test_ratio_and_length_are_inclusive():
    pairs = [Pair("a" * 10, "b" * 40), Pair("a" * 10, "b" * 41)]
    assert kept(Clean(max_ratio=4), pairs)[0] == pairs[:1]
    assert kept(Clean(max_characters=40), pairs)[0] == pairs[:1]


def test_all_together_count_each_pair_once():
    clean = Clean(
        drops_invalid_utf8=True, drops_control_characters=True, drops_duplicates=True,
        min_characters=2, max_characters=40, max_ratio=4,
    )  # fmt: skip
    good = [pair for pair in GOOD if min(map(len, pair)) > 1]
    actual, dropped = kept(clean, [*good, *BAD.values()])
    assert actual == good
    assert dropped == dict.fromkeys(BAD, 1)


def test_tabs_and_newlines_of_prompts_are_text():
    pairs = [Pair("a\tb", "c"), Pair("a", "b\tc"), Pair("a\r\nb", "c\n"), Pair("a\x0bb", "c")]
    clean = Clean(drops_duplicates=True, drops_control_characters=True)
    assert kept(clean, pairs) == (
        pairs[:3],
        {"an empty side": 0, "control characters": 1, "a repeat": 0},
    )


def test_a_repeat_is_of_both_sides():
    pairs = [Pair("a", "b"), Pair("a", "c"), Pair("c", "b"), Pair("a\tb", "c"), Pair("a", "b")]
    clean = Clean(drops_empty=False, drops_duplicates=True)
    assert kept(clean, pairs) == (pairs[:4], {"a repeat": 1})


def test_other_splits_are_kept_whole_but_for_what_cannot_be_read():
    clean = Clean(drops_invalid_utf8=True, drops_duplicates=True, max_characters=40)
    actual, dropped = kept(clean, [*GOOD, *BAD.values()], "test")
    assert actual == [*GOOD, *(pair for reason, pair in BAD.items() if reason != "not UTF-8")]
    assert dropped == {"not UTF-8": 1}


def test_limits_that_leave_nothing_are_refused():
    with pytest.raises(UserError, match=r"Clean.min_characters = 9 is more than .* = 8"):
        Clean(min_characters=9, max_characters=8)
    with pytest.raises(UserError, match=r"Clean.max_ratio = 0\.5: legal: .* at least 1"):
        Clean(max_ratio=0.5)
