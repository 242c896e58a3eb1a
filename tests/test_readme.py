"""Every command of the README works as it is written, typed one after the other."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tests.toys import ROOT

README = (ROOT / "README.md").read_text()


def commands() -> str:
    """The shell blocks of the README, in order, but for make: it is what runs this test."""
    blocks = re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    return "\n".join(line for line in lines if not line.startswith(("make", ". .venv")))


def test_every_command_of_the_readme_works(tmp_path: Path) -> None:
    shutil.copy(ROOT / "README.md", tmp_path)
    bin_folder = str(Path(sys.executable).parent)
    done = subprocess.run(
        ["bash", "-euxo", "pipefail", "-c", commands()],
        cwd=tmp_path,
        env={
            **os.environ,
            "HOME": str(tmp_path),
            "PATH": f"{bin_folder}:{os.environ['PATH']}",
        },
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "4,899,222,528 parameters" in done.stdout
    assert done.stdout.count("Return the") >= 1


def test_every_file_that_the_readme_names_exists() -> None:
    names = re.findall(r"\]\(([\w./-]+)\)", README) + re.findall(
        r"(?:configs|layouts)/[\w/.]+gin", README
    )
    assert len(names) > 10
    for name in names:
        assert (ROOT / name).exists(), name
