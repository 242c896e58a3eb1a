"""The notebooks of docs/examples run, and have the outputs of a run.

`python -m tests.test_examples` runs them, and writes their outputs again.
"""

import os
from pathlib import Path

import jax
import nbformat
import pytest
from nbclient import NotebookClient
from nbformat import NotebookNode

from tests.toys import ROOT

NOTEBOOKS = sorted((ROOT / "docs" / "examples").glob("*.ipynb"))


def executed(path: Path, folder: Path, **variables: str) -> NotebookNode:
    """A notebook after a run of it in a folder, by this project and with these variables."""
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook,
        timeout=300,
        kernel_name="python3",
        coalesce_streams=True,
        record_timing=False,
        resources={"metadata": {"path": str(folder)}},
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT), "IPYTHONDIR": str(folder / "ipython")}
    client.execute(env=env | variables)
    return notebook


def outputs(notebook: NotebookNode) -> list[list[str]]:
    """The kinds of outputs of each cell of code."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return [
        sorted({output.get("name", output.output_type) for output in cell.outputs})
        for cell in cells
    ]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_has_its_outputs(path: Path, tmp_path: Path) -> None:
    folder = jax.config.values["jax_compilation_cache_dir"]
    fast = {"JAX_COMPILATION_CACHE_DIR": str(folder), "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    notebook = executed(path, tmp_path, **fast)
    saved = nbformat.read(path, as_version=4)
    assert outputs(saved) == outputs(notebook)
    assert path.stat().st_size < 100_000


if __name__ == "__main__":
    import tempfile

    for path in NOTEBOOKS:
        with tempfile.TemporaryDirectory() as folder:
            nbformat.write(executed(path, Path(folder)), path)
