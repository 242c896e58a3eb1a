"""Runs the command line inside the test's process, which is fast and keeps its output."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from scripts import cli, devices, exits
from tests.toys import optax_promotion
from tests.trainer.command import settings, write_text
from tests.trainer.conftest import optax_types  # noqa: F401


@dataclasses.dataclass
class Answer:
    code: int
    out: str
    error: str


Meshloom = Callable[..., Answer]


def call(*arguments: str) -> int:
    """Runs `meshloom` with these arguments on the devices of the tests; returns the exit code."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as exit:
        patch.setattr(devices, "start_devices", lambda *_: None)
        exits.exits(lambda: cli.cli.main(arguments, standalone_mode=False))
    assert isinstance(exit.value.code, int)
    return exit.value.code


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Meshloom:
    def run(*arguments: str) -> Answer:
        capsys.readouterr()
        return Answer(call(*arguments), *capsys.readouterr())

    return run


@dataclasses.dataclass
class Place:
    """Holds a folder with a text, and the flags to train on it."""

    folder: Path
    text: Path

    def flags(self, *params: str, layout: str = "whole") -> list[str]:
        given = [*settings(self.text), "Run.steps = 4", "Run.checkpoint_every = 2", *params]
        return [
            f"--data_dir={self.folder / 'data'}",
            f"--gin_file=layouts/{layout}.gin",
            *(f"--gin_param={setting}" for setting in given),
        ]

    @property
    def model_dir(self) -> str:
        return f"--model_dir={self.folder / 'run'}"


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path, write_text(tmp_path / "text.txt"))


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """Trains a model for four steps, with checkpoints at two and four; tests may only read it."""
    folder = tmp_path_factory.mktemp("trained")
    place = Place(folder, write_text(folder / "text.txt"))
    with optax_promotion():
        assert call("train", place.model_dir, *place.flags()) == 0
    return place
