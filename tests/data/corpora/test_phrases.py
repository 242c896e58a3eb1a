"""The phrases corpus: the same pairs each time, no source twice, every language both ways."""

import os
import re
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest
from babel import Locale

from configs.errors import UserError
from data.corpora import phrase_words as say
from data.corpora import phrases
from data.corpora.phrases import shared_names

SPLITS = ("train", "validation", "test")


@pytest.fixture(scope="module")
def corpus():
    return phrases.corpus("de", "en", seed=0, train=3000, held_out=150)


def test_the_splits_have_the_given_sizes(corpus):
    assert {split: len(pairs) for split, pairs in corpus.items()} == {
        "train": 3000, "validation": 150, "test": 150,
    }  # fmt: skip


def test_no_source_occurs_twice_in_one_split_or_two(corpus):
    sources = [source for pairs in corpus.values() for source, _ in pairs]
    assert len(set(sources)) == len(sources)


def test_the_hash_of_a_source_decides_its_split(corpus):
    for split, pairs in corpus.items():
        assert {phrases.split_of(source) for source, _ in pairs} == {split}
    actual = [phrases.split_of(f"Satz {i}") for i in range(20_000)]
    assert 0.035 < actual.count("validation") / 20_000 < 0.045
    assert 0.035 < actual.count("test") / 20_000 < 0.045


def test_more_training_pairs_move_no_pair(corpus):
    fewer = phrases.corpus("de", "en", seed=0, train=500, held_out=150)
    assert fewer["train"] == corpus["train"][:500]
    assert fewer["validation"] == corpus["validation"] and fewer["test"] == corpus["test"]


def test_another_process_draws_the_same_pairs(corpus):
    code = "from data.corpora.phrases import corpus; print(ascii(corpus('de', 'en', 0, 100, 10)))"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=Path(__file__).parents[3],
        env={**os.environ, "PYTHONHASHSEED": "123"},
        capture_output=True,
        text=True,
    )
    expected = {split: corpus[split][: 100 if split == "train" else 10] for split in SPLITS}
    assert done.stdout.strip() == ascii(expected), done.stderr


def test_another_seed_draws_other_pairs(corpus):
    other = phrases.corpus("de", "en", seed=1, train=100, held_out=10)
    assert not set(other["train"]) & set(corpus["train"][:100])


@pytest.mark.parametrize("language", phrases.LANGUAGES)
def test_every_language_reads_and_writes(language):
    there = phrases.corpus(language, "en", seed=0, train=300, held_out=5)
    back = phrases.corpus("en", language, seed=0, train=300, held_out=5)
    for text in texts(there) + texts(back):
        assert text and text == text.strip() and "  " not in text
        assert not re.search(r"[\u00a0\u00ad\u2009\u202f{}]|\bNone\b", text)


def test_two_languages_other_than_english_work():
    pairs = phrases.corpus("uk", "tr", seed=0, train=100, held_out=5)["train"]
    assert len(pairs) == 100
    assert all(re.search("[\u0400-\u04ff]|\\d", source) for source, _ in pairs)
    assert not any(re.search("[\u0400-\u04ff]", target) for _, target in pairs)


def texts(corpus):
    return [text for pairs in corpus.values() for pair in pairs for text in pair]


WEDNESDAY = datetime(2014, 3, 12, 14, 30)


@pytest.mark.parametrize(
    "say_it, german, english",
    [
        (lambda x: say.date(WEDNESDAY, "full", x),
         "Mittwoch, 12. März 2014", "Wednesday, March 12, 2014"),
        (lambda x: say.date(WEDNESDAY, "yw", x), "Woche 11 des Jahres 2014", "week 11 of 2014"),
        (lambda x: say.time(WEDNESDAY, x), "14:30", "2:30 PM"),
        (lambda x: say.date_and_time(WEDNESDAY, "long", x),
         "12. März 2014, 14:30", "March 12, 2014, 2:30 PM"),
        (lambda x: say.span(1, "hour", x), "1 Stunde", "1 hour"),
        (lambda x: say.money(1250, "EUR", "sign", x), "1.250,00 €", "€1,250.00"),
        (lambda x: say.money(2, "PLN", "name", x), "2 Polnische Złoty", "2 Polish zlotys"),
        (lambda x: say.percent(12.5, x), "12,5 %", "12.5%"),
        (lambda x: say.number(34000, x), "34.000", "34,000"),
        (lambda x: say.listed(("A", "B", "C"), "and", x), "A, B und C", "A, B, and C"),
        (lambda x: say.listed(("A", "B"), "or", x), "A oder B", "A or B"),
        (lambda x: say.name("territory", "AT", x), "Österreich", "Austria"),
    ],
)  # fmt: skip
def test_both_languages_say_the_same(say_it, german, english):
    assert say_it("de") == german
    assert say_it("en") == english


def test_names_are_those_of_the_locale():
    for language in ("de", "en", "fi", "uk"):
        names = say.names("territory", language)
        territories = Locale(language).territories
        assert len(names) > 200
        assert all(name == territories[code] for code, name in names.items() if " " not in name)
    assert "ZZ" not in say.names("territory", "en")


def test_weeks_of_a_year_have_one_number_in_all_languages():
    for language in phrases.LANGUAGES:
        assert re.search(r"\b11(?!\d)", say.date(WEDNESDAY, "yw", language)), language


def test_an_ambiguous_name_is_not_drawn():
    """In German, Fijian is called as the country is."""
    shared = shared_names("de", "en")
    assert "fj" in say.names("language", "de")
    assert "fj" not in shared["language"]
    translations = {}
    for kind, codes in shared.items():
        for code in codes:
            name, translation = say.name(kind, code, "de"), say.name(kind, code, "en")
            assert translations.setdefault(name, translation) == translation


def test_sentences_are_of_moderate_length(corpus):
    words = sorted(len(target.split()) for _, target in corpus["train"])
    assert 7 < sum(words) / len(words) < 11
    assert words[len(words) // 20] >= 3 and words[-1] < 60


def test_held_out_names_were_seen_in_training(corpus):
    """What is held out is combinations, not words."""
    trained = {word for source, _ in corpus["train"] for word in source.split()}
    words = [word for source, _ in corpus["test"] for word in source.split()]
    assert sum(word in trained for word in words) / len(words) > 0.9


def test_versions_name_libraries_data_and_rules():
    actual = phrases.versions()
    assert list(actual) == ["babel", "cldr", "rules"]
    assert all(actual.values())


def test_a_wrong_language_is_named():
    with pytest.raises(UserError, match=r"'dee'.*Legal: cs, da, de, .*Did you mean de\?"):
        phrases.corpus("dee", "en", 0, 1, 1)
    with pytest.raises(UserError, match="two different"):
        phrases.corpus("de", "de", 0, 1, 1)
