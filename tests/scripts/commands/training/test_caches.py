"""`meshloom prepare --list` and `--prune`: what is shown, asked, kept and deleted."""

import pytest

from tests.scripts.conftest import Meshloom, Place

OTHER = "--gin_param=SentencePiece.size = 280"


def folders(place: Place) -> list[str]:
    return sorted(f.name for f in (place.folder / "data").iterdir() if f.is_dir())


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split("  ") if cell.strip()]


def test_other_settings_are_listed_and_pruned(
    run: Meshloom, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = place.flags()
    assert "There are no caches" in run("prepare", "--list", given[0]).error
    assert run("prepare", *given).code == 0
    assert run("prepare", *given, OTHER).code == 0
    first, second = folders(place)
    assert first == "toy" and second.startswith("toy@")

    head, *lines = run("prepare", "--list", *given).out.splitlines()
    assert cells(head) == ["task", "folder", "MB", "written", "use", "differs"]
    newest, oldest = map(cells, lines)
    size = "SentencePiece.size was 280 and is 288"
    assert newest[1] == second and newest[4:] == ["other settings or text", size]
    assert oldest[1] == first and oldest[4:] == ["these settings"]
    assert "size was 288 and is 280" in run("prepare", "--list", given[0]).out

    assert run("prepare", "--prune", given[0]).code == 2
    assert run("prepare", "--yes", *given).code == 2
    refused = run("prepare", "--prune", *given)
    assert refused.code == 2 and f"would delete {second}.  Add --yes." in refused.error
    assert folders(place) == [first, second]
    pruned = run("prepare", "--prune", "--yes", *given)
    assert pruned.code == 0 and "Deleted " in pruned.error and folders(place) == [first]
    kept = run("prepare", "--prune", *given)
    assert kept.code == 0 and kept.out == ""
    assert "no cache of task 'toy' with other settings or another text" in kept.error
    assert "and 1 with these." in kept.error
    nowhere = run("prepare", "--prune", f"--data_dir={place.folder / 'other'}", *given[1:])
    assert nowhere.code == 0 and "and 0 with these." in nowhere.error
