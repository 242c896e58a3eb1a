"""Defines fixtures for gin files."""

import pytest


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Changes to an empty folder, in which `write` creates gin files."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def write(folder):
    def write(text: str, name: str = "run.gin") -> str:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return name

    return write
