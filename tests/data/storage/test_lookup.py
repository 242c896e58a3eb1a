"""Names and sizes of files."""

from pathlib import Path

from data.storage import lookup


def test_sizes_are_of_the_files_that_are_still_there(tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("1")
    (tmp_path / "link").symlink_to("removed")
    assert list(lookup.sizes_below(tmp_path)) == [("kept", 1)]
