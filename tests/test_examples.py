"""The examples of docs/examples run, and notebooks have the outputs of a run.

`python -m tests.test_examples` runs them, and writes their outputs again.
"""

import functools
import os
from pathlib import Path
from types import ModuleType

import jax
import nbformat
import numpy as np
import pytest
from nbclient import NotebookClient
from nbformat import NotebookNode

from configs import imports
from configs.load import load
from layouts.layout import Layout
from layouts.mesh import make_mesh
from models.loss import Criterion
from models.transformer import Transformer
from tests.toys import (
    FLOAT64,
    ROOT,
    ROUND_OFF,
    WHOLE,
    example,
    on_mesh,
    optax_promotion,
    packed_rows,
)
from trainer.step import TrainStepSpec, init_state, train_step

BOTH = "batch:rows;hidden:cols"
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


@pytest.mark.long
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_has_its_outputs(path: Path, tmp_path: Path) -> None:
    folder = jax.config.values["jax_compilation_cache_dir"]
    fast = {"JAX_COMPILATION_CACHE_DIR": str(folder), "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    notebook = executed(path, tmp_path, **fast)
    saved = nbformat.read(path, as_version=4)
    assert outputs(saved) == outputs(notebook)
    assert path.stat().st_size < 100_000


@pytest.fixture(scope="module")
def mesh_tensorflow() -> ModuleType:
    """The module of docs/examples, imported as a run file does."""
    return example("mesh_tensorflow")


MTF_LAYOUTS = [("all:4", "batch:all"), ("all:4", "hidden:all"), ("rows:2,cols:2", BOTH)]


@pytest.mark.few(1)
@pytest.mark.parametrize(("mesh", "rules"), MTF_LAYOUTS, ids=lambda text: text)
def test_the_networks_of_mesh_tensorflow_have_its_layouts(
    mesh_tensorflow: ModuleType, mesh: str, rules: str
) -> None:
    """Loss and gradients of the toy and of the README's network are those of one device."""
    rng = np.random.default_rng(0)
    x_BI, wi_IH, wo_HI = (rng.normal(size=s).astype("f") for s in ((4, 6), (6, 8), (8, 6)))
    images = rng.integers(0, 256, (4, 7, 5, 1)).astype(np.uint8)
    batch = {"images_BYXZ": images, "targets_BL": np.arange(4, dtype=np.int32)[:, None],
             "segments_BL": np.ones((4, 1), np.int32)}  # fmt: skip
    spec = mesh_tensorflow.Mnist(vocab=6, rows=7, cols=5, hidden=8)

    def computed(layout: Layout) -> list[np.ndarray]:
        with jax.set_mesh(make_mesh(layout)):
            toy = jax.value_and_grad(functools.partial(mesh_tensorflow.toy_loss, layout), (1, 2))
            model = spec.model(layout)
            params = jax.jit(model.init)(jax.random.key(0))
            shards = jax.tree.leaves(params)[0].sharding.shard_shape((7, 5, 8))
            assert shards == (7, 5, 8 // mesh_size(layout))
            loss = jax.grad(lambda params: model.loss(params, batch, Criterion()).objective)
            return [*map(np.asarray, jax.tree.leaves((toy(x_BI, wi_IH, wo_HI), loss(params))))]

    def mesh_size(layout: Layout) -> int:
        return {"batch:all": 1, "hidden:all": 4, BOTH: 2}[layout.rules]

    for one, many in zip(
        computed(Layout(mesh="all:1", rules="batch:all")),
        computed(Layout(mesh=mesh, rules=rules)),
        strict=True,
    ):
        np.testing.assert_allclose(many, one, rtol=1e-5, atol=1e-6)


def test_a_unet_computes_the_same_under_layouts(float64: None) -> None:
    rng = np.random.default_rng(0)
    spec = example("unet").UNet(vocab=2, d_model=2, levels=2, kernel=2, precision=FLOAT64)
    batch = {"volumes_BZYX": rng.integers(0, 256, (2, 8, 6, 4)).astype(np.int32),
             "targets_BL": rng.integers(0, 2, (2, 192)).astype(np.int32),
             "segments_BL": np.ones((2, 192), np.int32)}  # fmt: skip

    def computed(layout: Layout) -> list[np.ndarray]:
        with jax.set_mesh(make_mesh(layout)):
            model = spec.model(layout)
            params = jax.jit(model.init)(jax.random.key(0))
            loss = jax.value_and_grad(lambda p: model.loss(p, batch, Criterion()).objective)
            return [*map(np.asarray, jax.tree.leaves(jax.jit(loss)(params)))]

    expected = computed(WHOLE)
    for layout in (
        Layout(mesh="x:4", rules="depth:x;length:x"),
        Layout(mesh="x:2,y:2,z:2", rules="batch:z;depth:x+;height:y+;features:x?"),
        Layout(mesh="x:5", rules="height:x+;length:x+"),
    ):
        for many, one in zip(computed(layout), expected, strict=True):
            np.testing.assert_allclose(many, one, rtol=0, atol=ROUND_OFF * np.abs(one).max())


@pytest.mark.parametrize("name", ["sequence_parallel"])
def test_parts_of_a_user_train_under_layouts(name: str) -> None:
    """An attention, positions, a norm, a router and an optimizer that no file of Meshloom names."""
    imports.allow_folder(ROOT / "docs" / "examples")
    sizes = {
        "vocab": 64,
        "d_model": 16,
        "d_ff": 24,
        "heads": 8,
        "kv_heads": 8,
        "d_kv": 6,
        "length": 24,
    }
    config = load(
        ["configs/models/tiny.gin", "docs/examples/own_parts.gin"],
        [f"Transformer.{size} = {value}" for size, value in sizes.items()],
    )
    spec = config.make(Transformer)
    assert {type(part).__name__ for part in spec.parts} >= {
        "Tempered", "PartialRotary", "CenteredNorm", "Moe"
    }  # fmt: skip

    def trained(layout: Layout) -> list[np.ndarray]:
        program = TrainStepSpec(
            model=spec.model(layout), optimizer=config.value("Run.optimizer"),
            criterion=Criterion(), steps=2, seed=0, microbatches=1,
        )  # fmt: skip
        mesh, batch = on_mesh(layout, packed_rows([[9, 11]] * 8, 24, 64))
        with jax.set_mesh(mesh), optax_promotion():
            _, metrics = train_step(program, init_state(program, mesh), batch)
        return [np.asarray(metrics["loss"]), np.asarray(metrics["grad_norm"])]

    layout = load([f"layouts/{name}.gin"]).make(Layout)
    np.testing.assert_allclose(trained(layout), trained(WHOLE), rtol=1e-5)


if __name__ == "__main__":
    import tempfile

    for path in NOTEBOOKS:
        with tempfile.TemporaryDirectory() as folder:
            nbformat.write(executed(path, Path(folder)), path)
