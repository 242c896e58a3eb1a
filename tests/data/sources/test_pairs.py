"""Pairs: tags, and what stands on one line."""

from collections.abc import Iterator

import pytest

from configs.errors import UserError
from configs.spec import spec
from data.sources.pairs import Pair, Pairs, chosen_tag, tagged
from tests.data.conftest import pairs_of


@spec
class ThreePairs(Pairs):
    """Pairs whose halves hold what no line may hold."""

    def read(self, split: str, errors: str = "strict") -> Iterator[Pair]:
        yield from [Pair("ein\tTag", "one\rday"), Pair("zwei", "two"), Pair("", "")]


def test_no_half_of_a_pair_holds_a_tab_or_a_line_break():
    assert list(pairs_of(ThreePairs(), "train"))[:2] == [("ein Tag", "one day"), ("zwei", "two")]
    assert list(ThreePairs().untagged("train"))[1:] == [("zwei", "two"), ("", "")]


def test_a_tag_precedes_each_source_and_no_target():
    source = ThreePairs(tag="2de")
    assert list(pairs_of(source, "train"))[1:] == [("<2de> zwei", "two"), ("<2de> ", "")]
    assert list(source.untagged("train"))[1] == ("zwei", "two")
    assert tagged("zwei", "2de") == "<2de> zwei"
    assert (source.tags, ThreePairs().tags) == (("2de",), ())


@pytest.mark.parametrize(
    ("tag", "word", "name"),
    [
        ("2de", "<2de>", "2de"),
        ("<2de>", "<2de>", "2de"),
        (">>deu_Latn<<", ">>deu_Latn<<", "deu_Latn"),
        ("[zurück]", "[zurück]", "zurück"),
    ],
)
def test_a_tag_holds_brackets_or_gets_them(tag, word, name):
    source = ThreePairs(tag=tag)
    assert next(pairs_of(source, "train")).source == f"{word} ein Tag"
    assert list(source.parts_of("train")) == [name]
    assert chosen_tag(word, source.tags) == tag


@pytest.mark.parametrize("tag", ["", "2 de", "2▁de", "<>"])
def test_a_tag_is_one_word(tag):
    with pytest.raises(UserError) as error:
        ThreePairs(tag=tag)
    words = "a string of one word (no space, no '▁') with a letter or digit or None"
    assert str(error.value) == f"ThreePairs.tag = {tag!r}: legal: {words}."


def test_a_tag_is_chosen_among_those_that_a_task_knows():
    assert chosen_tag("2fr", ("2de", "2fr")) == "2fr"
    assert chosen_tag(None, ("2de",)) == "2de"
    assert chosen_tag(None, ()) is None


@pytest.mark.parametrize(
    ("tag", "tags", "message"),
    [
        ("2df", ("2de", "2fr"), r"tag '2df': .*  Did you mean 2..\?  Legal: 2de, 2fr\."),
        (None, ("2de", "2fr"), r"no tag was given\.  Legal: 2de, 2fr\."),
        ("2de", (), r"tag '2de': no part of the task has it.  The task has no tags"),
    ],
)
def test_an_unknown_tag_is_an_error_with_the_legal_ones(tag, tags, message):
    with pytest.raises(UserError, match=message):
        chosen_tag(tag, tags)
