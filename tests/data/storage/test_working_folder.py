"""Files of a remote folder, which grow on this machine."""

from pathlib import Path

from data.storage import lookup
from data.storage.working_folder import WorkingFolder


def test_files_grow_here_and_are_uploaded(there: Path) -> None:
    (there / "old").write_text("1\n")
    with WorkingFolder(there) as folder:
        folder.fetch("old", "absent")
        with (folder.path / "old").open("a") as file:
            file.write("2\n")
        folder.upload()
        assert (there / "old").read_text() == "1\n2\n"
        (folder.path / "events").mkdir()
        (folder.path / "events/new").write_text("3\n")
        (folder.path / "latest").symlink_to("removed")  # as wandb does
    assert dict(lookup.sizes_below(there)) == {"events/new": 2, "old": 4}
    assert not folder.path.exists()
