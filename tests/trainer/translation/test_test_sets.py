"""Test sets by name: read where they lie, never downloaded."""

import urllib.request
from pathlib import Path

import pytest
from sacrebleu.dataset import DATASETS

from configs.errors import UserError
from trainer.translation.metrics import read_test_set


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        pytest.fail("a download was started")

    monkeypatch.setattr(urllib.request, "urlopen", refuse)


def cached(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Lets sacrebleu keep a test set below a folder."""
    place = folder / name
    monkeypatch.setattr(DATASETS[name], "_outdir", str(place))
    monkeypatch.setattr(DATASETS[name], "_rawdir", str(place / "raw"))
    return place


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def test_a_set_is_read_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = cached("wmt14/full", tmp_path, monkeypatch)
    write(place / "wmt14_full.en-de.src", "one\u2028more\ntwo\n")
    write(place / "wmt14_full.en-de.ref", "eins\nzwei\n")
    expected = ["one\u2028more", "two"], [["eins", "zwei"]]
    assert read_test_set("wmt14/full", "en-de") == expected


def test_a_set_with_several_references_gives_those_that_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = cached("wmt22", tmp_path, monkeypatch)
    for field in ("src", "ref-A", "ref-B", "ref-C"):
        write(place / f"wmt22.cs-en.{field}", f"{field} 1\n{field} 2\n")
    assert read_test_set("wmt22", "cs-en")[1] == [["ref-B 1", "ref-B 2"]]


def test_a_set_that_is_not_in_the_cache_is_refused_with_the_way_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("wmt14/full", "wmt23"):
        place = cached(name, tmp_path, monkeypatch)
        with pytest.raises(UserError) as error:
            read_test_set(name, "en-de")
        assert str(place) in str(error.value)
        assert f"sacrebleu -t {name} -l en-de --echo src" in str(error.value)
    assert not list(tmp_path.rglob("*"))


def test_names_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="Did you mean wmt14/full"):
        read_test_set("wmt14/ful", "en-de")
    with pytest.raises(
        UserError, match=r"en-dee: no such pair.*Did you mean en-de\?.*Legal: cs-en"
    ):
        read_test_set("wmt14/full", "en-dee")


def test_a_set_cut_short_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = cached("wmt14/full", tmp_path, monkeypatch)
    write(place / "wmt14_full.en-de.src", "one\ntwo\n")
    write(place / "wmt14_full.en-de.ref", "eins\n")
    with pytest.raises(UserError, match=r"en-de\.src: 2 .* has 1"):
        read_test_set("wmt14/full", "en-de")
