"""Every command of the README and of docs/ works as it is written, one after the other."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import released
from tests.toys import ROOT

# A block that begins with ```sh runs here; the commands of other blocks take hours or need data.
RUN_HERE = re.compile(r"```sh\n(.*?)```", re.DOTALL)
LINK = re.compile(r"\]\(([\w./-]+)\)")
NAME = re.compile(
    r"\b(?:configs|layouts|models|data|trainer|scripts|tests|docs)/[\w/.]+\.(?:gin|py|md|txt)\b"
)
MODULE = re.compile(r"python -m ((?:scripts|tests)\.[\w.]*\w)")
NAMES = ("README.md", "CONTRIBUTING.md")
PAGES = [*(ROOT / name for name in NAMES), *sorted((ROOT / "docs").rglob("*.md"))]
JOURNEYS = [page for page in PAGES if page.parent.name == "journeys"]


def commands(pages: list[Path]) -> str:
    """The shell blocks of these pages, in order, without make, which runs this test."""
    blocks = [block for page in pages for block in RUN_HERE.findall(page.read_text())]
    lines = [line for block in blocks for line in block.splitlines()]
    return "\n".join(line for line in lines if not line.startswith(("make", ". .venv")))


def output_of(pages: list[Path], folder: Path) -> str:
    """Runs the commands of pages in a folder; returns what they print."""
    bin_folder = str(Path(sys.executable).parent)
    done = subprocess.run(
        ["bash", "-euxo", "pipefail", "-c", commands(pages)],
        cwd=folder,
        env={**os.environ, "HOME": str(folder), "PATH": f"{bin_folder}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


OTHERS = [page for page in PAGES if page not in JOURNEYS]


@pytest.mark.parametrize(
    "pages", [PAGES[:1], pytest.param(OTHERS, marks=pytest.mark.long)], ids=len
)
def test_every_command_works(tmp_path: Path, pages: list[Path]) -> None:
    shutil.copytree(ROOT / "docs", tmp_path / "docs")  # the text that some commands train on
    printed = output_of(pages, tmp_path)
    assert "4,899,222,528 parameters" in printed
    assert printed.count("Return the") >= 1


@pytest.mark.long
@pytest.mark.parametrize("page", JOURNEYS, ids=lambda page: page.stem)
def test_a_journey_with_a_released_model_works(tmp_path: Path, page: Path) -> None:
    """Small models with random weights are in the folders of those that the page downloads."""
    released.write_smollm2(tmp_path / "SmolLM2-135M-Instruct")
    released.write_opus_mt(tmp_path / "opus-mt-en-de")
    (tmp_path / "text.txt").write_text("The capital of France is Paris.\nTwo lines.\n")
    output_of([page], tmp_path)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_that_a_page_names_exists(page: Path) -> None:
    text = page.read_text()
    links = {(page.parent / name).resolve() for name in LINK.findall(text)}
    names = {ROOT / name for name in NAME.findall(text) if not name.endswith("/mine.gin")}
    modules = {ROOT / f"{name.replace('.', '/')}.py" for name in MODULE.findall(text)}
    missing = [path for path in links | names | modules if not path.exists()]
    assert not missing


def test_the_names_of_files_are_read() -> None:
    text = "See [it](../layouts/fsdp.gin), `models/loss.py`; `python -m scripts.quickstart --x`."
    assert LINK.findall(text) == ["../layouts/fsdp.gin"]
    assert NAME.findall(text) == ["layouts/fsdp.gin", "models/loss.py"]
    assert MODULE.findall(text) == ["scripts.quickstart"]
    assert sum(len(LINK.findall(page.read_text())) for page in PAGES) > 40


def test_the_index_names_every_page() -> None:
    index = set(LINK.findall((ROOT / "docs" / "README.md").read_text()))
    assert index >= {page.name for page in (ROOT / "docs").glob("*.md")} - {"README.md"}


def test_pages_are_readable_without_a_network() -> None:
    """The site would load a script for diagrams of Mermaid from another host."""
    assert not [page.name for page in PAGES if "```mermaid" in page.read_text()]


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150
