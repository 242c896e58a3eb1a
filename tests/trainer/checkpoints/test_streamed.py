"""Arrays are saved slice by slice, and read as any others."""

import weakref
from pathlib import Path

import jax
import numpy as np
from jax.sharding import NamedSharding

from layouts.layout import Layout
from layouts.mesh import make_mesh
from trainer.checkpoints.integrity import StreamedArray
from trainer.checkpoints.manager import Checkpoints

LAYERS = np.random.default_rng(0).normal(size=(5, 6, 4)).astype(np.float32)
ROWS = np.arange(14, dtype=np.float32).reshape(7, 2)
PATHS = {"params/layers_N/wi_DF": LAYERS.shape, "params/embed_VD": ROWS.shape}


def save(model_dir: Path, alive: list[int]) -> None:
    """Saves both; notes how many slices of the first are in memory when the next is read."""
    slices = weakref.WeakValueDictionary[int, np.ndarray]()

    def read(place: slice) -> np.ndarray:
        alive.append(len(slices))
        part = LAYERS[place].copy()
        slices[place.start] = part
        return part

    arrays = {
        "layers_N": {"wi_DF": StreamedArray(LAYERS.shape, LAYERS.dtype, read, 1)},
        "embed_VD": StreamedArray(ROWS.shape, ROWS.dtype, lambda place: ROWS[place], 3),
    }
    with Checkpoints(model_dir) as checkpoints:
        checkpoints.save(0, {"params": arrays})


def test_no_two_slices_are_in_memory(tmp_path: Path) -> None:
    alive: list[int] = []
    save(tmp_path, alive)
    assert len(alive) == 5 and max(alive) <= 1  # one may be on its way out
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.damage(0, reads_arrays=True) is None
        arrays = dict(checkpoints.arrays(0, PATHS))
    np.testing.assert_array_equal(arrays["params/layers_N/wi_DF"], LAYERS)
    np.testing.assert_array_equal(arrays["params/embed_VD"], ROWS)


def test_any_layout_restores_them(tmp_path: Path) -> None:
    save(tmp_path, [])
    layout = Layout(mesh="x:2,y:2", rules="d_model:x;d_ff:y")
    mesh = make_mesh(layout)

    def abstract(array: np.ndarray, axes: str) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, layout.place(axes))
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)

    params = {"layers_N": {"wi_DF": abstract(LAYERS, "NDF")}, "embed_VD": abstract(ROWS, "VD")}
    with jax.set_mesh(mesh), Checkpoints(tmp_path) as checkpoints:
        restored = checkpoints.restore_params(params, 0)
    np.testing.assert_array_equal(restored["layers_N"]["wi_DF"], LAYERS)
    np.testing.assert_array_equal(restored["embed_VD"], ROWS)
    assert restored["layers_N"]["wi_DF"].sharding.spec == layout.place("NDF")
