"""Sources: which lines each split has."""

from pathlib import Path

import pytest

from configs.errors import UserError
from data.sources.text import Source, TextFiles


@pytest.fixture
def one_file(tmp_path):
    path = tmp_path / "all.txt"
    path.write_text("".join(f"line number {i % 1500}\n\n" for i in range(2000)))
    return str(path)


def test_one_file_gives_a_held_out_split_that_shares_no_line(one_file):
    source = TextFiles(train=one_file, validation_fraction=0.1)
    train, validation = list(source.lines("train")), list(source.lines("validation"))
    assert len(train) + len(validation) == 2000
    assert not set(train) & set(validation)
    assert 0.07 < len(set(validation)) / 1500 < 0.13
    assert validation == list(source.lines("validation"))


def test_validation_files_leave_training_whole(one_file):
    source = TextFiles(train=one_file, validation=one_file)
    assert list(source.lines("train")) == list(source.lines("validation"))
    assert len(list(source.lines("train"))) == 2000


def test_splits_are_those_with_text(one_file):
    assert TextFiles(train=one_file).splits() == ("train", "validation")
    assert TextFiles(train=one_file, test=one_file).splits() == ("train", "validation", "test")
    assert isinstance(TextFiles(train=one_file), Source)


def test_fraction_outside_its_range_is_refused():
    with pytest.raises(UserError, match=r"fraction = 0\.9: legal: .* above 0 and below 0\.5"):
        TextFiles(train="x", validation_fraction=0.9)


def test_fingerprint_follows_the_file_and_is_none_without_it(one_file, tmp_path):
    source = TextFiles(train=one_file)
    before = source.fingerprint()
    assert before == source.fingerprint()
    with open(one_file, "a") as file:
        file.write("more\n")
    assert source.fingerprint() != before
    (tmp_path / "all.txt").unlink()
    assert source.fingerprint() is None


def test_examples_that_would_all_be_held_out_are_trained_on(tmp_path: Path) -> None:
    """A hash of the prompt selects them, and all may have the same prompt."""
    (tmp_path / "a.txt").write_text("one\n" * 400)
    (tmp_path / "b.txt").write_text("one\n" * 400 + "two\n")

    def split(name: str, file: str) -> list[str]:
        # Of the range of hashes, "one" is at 0.21, and "two" at 0.96.
        source = TextFiles(train=str(tmp_path / file), validation_fraction=0.25)
        return [*source.lines(name)]

    assert split("train", "b.txt") == ["two"] and split("validation", "b.txt") == ["one"] * 400
    assert split("train", "a.txt") == ["one"] * 400 and split("validation", "a.txt") == []


def test_what_a_split_needs_depends_on_what_is_held_out() -> None:
    source = TextFiles(train="a.txt")
    files, fraction = source.remedies("validation")
    assert fraction == "a TextFiles.validation_fraction above 0.02"
    assert files == "files of its own (TextFiles.validation)"
    assert source.remedies("train") == ("other files (TextFiles.train)",)
    named = TextFiles(train="a.txt", validation="b.txt")
    assert named.remedies("train") == ("other files (TextFiles.train)",)
