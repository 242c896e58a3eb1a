"""An editable install works; any other ends with one line that says what to do."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.toys import ROOT


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def build(checkout: Path, target: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hatchling", "build", "-t", target]
    return subprocess.run(command, cwd=checkout, capture_output=True, text=True)


def test_a_wheel_is_refused_in_one_line(checkout: Path) -> None:
    done = build(checkout, "wheel:standard")
    assert done.returncode != 0
    (line,) = done.stderr.strip().splitlines()
    assert "clone" in line and "pip install -e ." in line
    assert not list(checkout.glob("dist/*.whl"))


def test_an_editable_install_builds(checkout: Path) -> None:
    done = build(checkout, "wheel:editable")
    assert done.returncode == 0, done.stderr
    assert len(list(checkout.glob("dist/*.whl"))) == 1
