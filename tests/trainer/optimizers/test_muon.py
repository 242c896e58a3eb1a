"""Muon against a numpy version, and under layouts that split what it orthogonalizes."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from layouts.layout import Layout
from layouts.mesh import make_mesh
from models.api import WeightInfo
from models.feed_forward.moe.layer import Moe
from models.loss import Criterion
from models.parts import Block
from tests.toys import FLOAT64, ROUND_OFF, SPLITTABLE, WHOLE, on_mesh, optax_promotion, packed_rows
from trainer.optimizers.muon import Muon, is_matrix
from trainer.optimizers.schedules import Constant

ROWS = packed_rows([[9, 11]] * 8, 24, 64)


def orthogonalized(x: np.ndarray) -> np.ndarray:
    """Newton-Schulz, after Jordan et al. 2024."""
    a, b, c = 3.4445, -4.775, 2.0315
    x = x / np.linalg.norm(x)
    for _ in range(5):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return x


def test_matrices_are_orthogonalized_one_by_one_and_all_else_is_adams() -> None:
    rng = np.random.default_rng(0)
    shapes = {"layers_N/mlp/wi_DF": (3, 5, 7), "layers_N/wo_JKD": (3, 2, 4, 5), "embed_VD": (9, 5)}
    infos = {
        "layers_N/mlp/wi_DF": WeightInfo((3, 5, 7), ("layers", "d_model", "d_ff"), ("d_model",)),
        "layers_N/wo_JKD": WeightInfo(
            (3, 2, 4, 5), ("layers", "kv_heads", "d_kv", "d_model"), ("kv_heads", "d_kv")
        ),
        "embed_VD": WeightInfo((9, 5), ("vocab", "d_model"), ("d_model",)),
    }
    optimizer = Muon(schedule=Constant(peak=0.1), clip_global_norm=None, weight_decay=0.0)
    gradients = {path: rng.normal(size=shape).astype(np.float32) for path, shape in shapes.items()}
    nested = {
        "layers_N": {
            "mlp": {"wi_DF": gradients["layers_N/mlp/wi_DF"]},
            "wo_JKD": gradients["layers_N/wo_JKD"],
        },
        "embed_VD": gradients["embed_VD"],
    }
    with optax_promotion(), jax.set_mesh(make_mesh(WHOLE)):
        nested = jax.tree.map(jax.numpy.asarray, nested)
        transform = optimizer.transform(1, infos, WHOLE)
        updates, _ = transform.update(nested, transform.init(nested), nested)
    for wi_DF, update in zip(
        gradients["layers_N/mlp/wi_DF"], updates["layers_N"]["mlp"]["wi_DF"], strict=True
    ):
        expected = -0.1 * 0.2 * 7**0.5 * orthogonalized(wi_DF)
        np.testing.assert_allclose(update, expected, atol=2e-6, rtol=1e-4)
    for wo_JKD, update in zip(
        gradients["layers_N/wo_JKD"], updates["layers_N"]["wo_JKD"], strict=True
    ):
        expected = -0.1 * 0.2 * 8**0.5 * orthogonalized(wo_JKD.reshape(8, 5).T).T
        np.testing.assert_allclose(update.reshape(8, 5), expected, atol=2e-6, rtol=1e-4)
    adam = -0.1 * np.sign(gradients["embed_VD"])  # the first step of Adam
    np.testing.assert_allclose(updates["embed_VD"], adam, rtol=1e-5)


def test_matrices_are_those_of_layers() -> None:
    weights = SPLITTABLE.model(WHOLE).weights()
    names = {path.rpartition("/")[2] for path, info in weights.items() if is_matrix(path, info)}
    assert names == {"wq_DJQK", "wk_DJK", "wv_DJK", "wo_JQKD", "wi_DF", "wo_FD"}
    weights = dataclasses.replace(SPLITTABLE, first_blocks=(Block(),)).model(WHOLE).weights()
    first = {path: info for path, info in weights.items() if "/first/" in path}
    assert {p.rpartition("/")[2] for p, info in first.items() if is_matrix(p, info)} == names


@functools.cache
def updates(layout: Layout) -> dict[str, np.ndarray]:
    """Those of the first step, by path, without padding."""
    spec = dataclasses.replace(
        SPLITTABLE,
        layers=2,
        precision=FLOAT64,
        pattern=(Block(), Block(feed_forward=Moe(experts=4))),
    )
    mesh, batch = on_mesh(layout, ROWS)
    with optax_promotion(), jax.set_mesh(mesh):
        model = spec.model(layout)
        params = model.init(jax.random.key(0))
        gradients = jax.jit(jax.grad(lambda p: model.loss(p, batch, Criterion()).objective))(params)
        transform = Muon(schedule=Constant(peak=0.1)).transform(1, model.weights(), layout)
        state = jax.jit(transform.init)(params)
        changed, _ = jax.jit(transform.update)(gradients, state, params)
        infos = model.weights()
        return {
            path: np.asarray(x)[tuple(map(slice, infos[path].shape))]
            for path, x in by_path(changed).items()
        }


@pytest.mark.long
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    "layout",
    [
        Layout(mesh="data:8", rules="batch:data", param_rules="d_model:data?"),
        Layout(mesh="data:2,model:3", rules="batch:data;heads:model+;experts:model+"),
    ],
    ids=["fsdp", "padded"],
)
def test_no_layout_changes_its_updates(layout: Layout) -> None:
    one, many = updates(WHOLE), updates(layout)
    assert one.keys() == many.keys()
    for path, expected in one.items():
        np.testing.assert_allclose(many[path], expected, rtol=0, atol=100 * ROUND_OFF)


def by_path(tree: dict) -> dict[str, jax.Array]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): x for path, x in leaves}
