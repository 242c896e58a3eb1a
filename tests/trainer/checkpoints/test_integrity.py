"""What tells a whole checkpoint from a damaged one, without Orbax."""

import json
from pathlib import Path

import pytest
from etils import epath

from trainer.checkpoints import integrity
from trainer.checkpoints.integrity import (
    DamagedCheckpoint,
    Manifest,
    fingerprint,
    read,
    read_manifest,
    verify,
)


def write(folder: Path, **contents: str) -> epath.Path:
    """Writes files and the manifest that lists them."""
    files = {}
    for name, text in contents.items():
        (folder / name).write_text(text)
        files[name] = fingerprint(epath.Path(folder / name))
    (folder / integrity.MANIFEST).write_text(Manifest(1.5, False, files).dump())
    return epath.Path(folder)


def test_each_kind_of_damage_is_named(tmp_path: Path) -> None:
    folder = write(tmp_path, a="12345", b="6789")
    verify(folder)
    (tmp_path / "b").write_text("9876")
    with pytest.raises(DamagedCheckpoint, match="b is not what was saved"):
        verify(folder)
    (tmp_path / "b").write_text("67")
    with pytest.raises(DamagedCheckpoint, match="b has 2 of 4 bytes"):
        verify(folder)
    (tmp_path / "b").unlink()
    with pytest.raises(DamagedCheckpoint, match="b is missing or unreadable"):
        verify(folder)
    (tmp_path / integrity.MANIFEST).write_text("{")
    with pytest.raises(DamagedCheckpoint, match=r"manifest\.json is missing or unreadable"):
        verify(folder)


def test_every_changed_bit_of_the_manifest_is_noticed(tmp_path: Path) -> None:
    contents = Manifest(1.5, False, {"a": [5, 123]}).dump().encode()
    for bit in range(8 * len(contents)):
        changed = bytearray(contents)
        changed[bit // 8] ^= 1 << bit % 8
        (tmp_path / integrity.MANIFEST).write_bytes(changed)
        with pytest.raises(DamagedCheckpoint):
            read_manifest(epath.Path(tmp_path))


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "3",
        "null",
        "[" * 100_000,
        "{}",
        '{"metric": null}',
        '{"metric": "low", "files": {}}',
        '{"metric": NaN, "files": {}}',
        '{"metric": null, "files": ["a"]}',
        '{"metric": null, "files": {"a": 5}}',
        '{"metric": null, "files": {"a": []}}',
        '{"metric": null, "files": {"a": [5, "x"]}}',
        '{"metric": null, "files": {"a\\u0000": [5]}}',
        '{"metric": null, "files": {"..": [5]}}',
        '{"metric": null, "files": {}, "crc32": 0}',
    ],
)
def test_a_manifest_of_another_shape_is_damage(tmp_path: Path, text: str) -> None:
    (tmp_path / integrity.MANIFEST).write_text(text)
    with pytest.raises(DamagedCheckpoint):
        verify(epath.Path(tmp_path))


def test_a_manifest_of_an_older_version_is_read(tmp_path: Path) -> None:
    folder = write(tmp_path, a="12345")
    older = {"metric": 2.5, "higher_is_better": True, "files": {"a": fingerprint(folder / "a")}}
    (tmp_path / integrity.MANIFEST).write_text(json.dumps(older))
    assert (read_manifest(folder).metric, read_manifest(folder).run) == (2.5, None)
    verify(folder)


def test_large_files_are_known_by_their_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(integrity, "CHECKSUM_UP_TO_BYTES", 4)
    folder = write(tmp_path, large="12345", small="1234")
    assert [len(fingerprint(folder / name)) for name in ("large", "small")] == [1, 2]
    (tmp_path / "large").write_text("54321")
    verify(folder)


def test_what_cannot_be_read_is_damage_and_lack_of_memory_is_not() -> None:
    def fail(error: Exception) -> None:
        raise error

    assert read(lambda: 7) == 7
    with pytest.raises(DamagedCheckpoint, match="ends too early"):
        read(lambda: fail(Exception("array ends\n too early")))
    with pytest.raises(MemoryError):
        read(lambda: fail(MemoryError()))
