"""Folders that appear whole or not at all."""

from pathlib import Path

import pytest
import requests

from configs.errors import UserError
from data.storage.folders import resumable_folder, whole_folder


def test_a_folder_appears_whole_and_replaces_the_old(tmp_path):
    for text in ("old", "new"):
        with whole_folder(tmp_path / "x") as folder:
            (folder / "file").write_text(text)
            assert not (tmp_path / "x").exists() or (tmp_path / "x/file").read_text() == "old"
    assert (tmp_path / "x/file").read_text() == "new"
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, UserError("x"), RuntimeError])
def test_an_error_leaves_the_old_folder_and_nothing_else(tmp_path, error):
    with whole_folder(tmp_path / "x") as folder:
        (folder / "file").write_text("old")
    with (
        pytest.raises((KeyboardInterrupt, ValueError, RuntimeError)),
        whole_folder(tmp_path / "x") as folder,
    ):
        (folder / "file").write_text("half")
        raise error
    assert (tmp_path / "x/file").read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


def test_a_build_that_the_storage_ends_goes_on_where_it_was(tmp_path: Path) -> None:
    with (
        pytest.raises(requests.ConnectionError),
        resumable_folder(tmp_path / "rows") as folder,
    ):
        (folder / "part").touch()
        raise requests.ConnectionError("refused")
    with resumable_folder(tmp_path / "rows") as folder:
        assert (folder / "part").exists()
