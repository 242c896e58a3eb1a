"""First weights from another run: copies for experts, and what does not fit."""

import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest

from configs.errors import UserError
from layouts.layout import Layout
from layouts.mesh import make_mesh
from models.api import Params
from models.attention.latent import Latent
from models.feed_forward.mlp import Mlp
from models.feed_forward.moe.layer import Moe
from models.feed_forward.moe.routing import SigmoidTopK, Top2, TopK
from models.loss import Criterion
from models.parts import Block
from models.positions.rotary import Rotary
from models.transformer import Transformer
from tests.toys import SPLITTABLE, WHOLE, on_mesh, packed_rows
from trainer.checkpoints.manager import Checkpoints
from trainer.checkpoints.warm_start import warm_started

GATED = Mlp(gated=True)
DENSE = dataclasses.replace(SPLITTABLE, layers=4, positions=Rotary(), feed_forward=GATED)
ROOMY = Moe(experts=8, expert=GATED, router=Top2(evaluation_capacity_factor=9.0))
SPARSE = dataclasses.replace(DENSE, pattern=(Block(), Block(feed_forward=ROOMY)))
ROWS = packed_rows([[3, 5], [8], [20, 2], [1, 6], [24], [9, 9], [4], [2, 2, 2]], 24, 64)
EXPERT_PARALLEL = Layout(mesh="data:8", rules="batch:data;experts:data")


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Params]:
    """A checkpoint of a dense model, and its weights."""
    folder, model = tmp_path_factory.mktemp("dense"), DENSE.model(WHOLE)
    with jax.set_mesh(make_mesh(WHOLE)), Checkpoints(folder) as checkpoints:
        params = jax.jit(model.init)(jax.random.key(1))
        checkpoints.save(7, {"params": params, "opt_state": {}, "step": jax.numpy.asarray(7)})
    return folder, params


def started(spec: Transformer, layout: Layout, folder: Path) -> Params:
    mesh = make_mesh(layout)
    with jax.set_mesh(mesh):
        params = jax.jit(spec.model(layout).init)(jax.random.key(2))
    return warm_started(params, str(folder), spec.model(layout), mesh)[0]


def loss(spec: Transformer, layout: Layout, params: Params) -> float:
    mesh, batch = on_mesh(layout, ROWS)
    with jax.set_mesh(mesh):
        return float(
            jax.jit(spec.model(layout).loss, static_argnums=2)(params, batch, Criterion()).loss
        )


@pytest.mark.few(1)
@pytest.mark.parametrize("layout", [WHOLE, EXPERT_PARALLEL], ids=["whole", "expert parallel"])
def test_copied_experts_say_what_the_dense_layer_said(
    dense: tuple[Path, Params], layout: Layout, log_lines: list[str]
) -> None:
    """Gates sum to 1, so the first loss of the sparse model is the dense one's."""
    folder, dense_params = dense
    params = started(SPARSE, layout, folder)
    expected = loss(DENSE, WHOLE, dense_params)
    np.testing.assert_allclose(loss(SPARSE, layout, params), expected, rtol=1e-5)
    assert log_lines == [
        f"Run.start_from: weights of {folder}, step 7; new: decoder/layers_N/block1/mlp/router_DE."
    ]
    wi_NEDF = params["decoder"]["layers_N"]["block1"]["mlp"]["wi_EDF"]
    np.testing.assert_array_equal(
        np.asarray(wi_NEDF)[:, 5], dense_params["decoder"]["layers_N"]["mlp"]["wi_DF"][1::2]
    )
    assert len(wi_NEDF.sharding.device_set) == (8 if layout is EXPERT_PARALLEL else 1)


@pytest.mark.long
def test_first_blocks_get_the_first_layers(dense: tuple[Path, Params]) -> None:
    folder, dense_params = dense
    blocks = (Block(feed_forward=ROOMY), Block())
    spec = dataclasses.replace(DENSE, first_blocks=blocks, pattern=blocks[:1])
    params = started(spec, EXPERT_PARALLEL, folder)
    expected = loss(DENSE, WHOLE, dense_params)
    np.testing.assert_allclose(loss(spec, EXPERT_PARALLEL, params), expected, rtol=1e-5)


@pytest.mark.long
def test_a_pattern_as_long_as_the_model_gets_one_layer_each(dense: tuple[Path, Params]) -> None:
    folder, dense_params = dense
    pattern = (Block(), Block(feed_forward=ROOMY))
    spec = dataclasses.replace(DENSE, first_blocks=(Block(), Block()), pattern=pattern)
    params = started(spec, WHOLE, folder)
    expected = loss(DENSE, WHOLE, dense_params)
    np.testing.assert_allclose(loss(spec, WHOLE, params), expected, rtol=1e-5)


@pytest.mark.long
def test_stages_get_the_layers_behind_first_blocks(tmp_path: Path) -> None:
    """The number of saved layers does not divide over the stages."""
    odd = dataclasses.replace(DENSE, layers=5)
    with jax.set_mesh(make_mesh(WHOLE)), Checkpoints(tmp_path) as checkpoints:
        saved = jax.jit(odd.model(WHOLE).init)(jax.random.key(1))
        checkpoints.save(1, {"params": saved, "opt_state": {}, "step": jax.numpy.asarray(1)})
    spec = dataclasses.replace(odd, first_blocks=(Block(),))
    params = started(spec, Layout(mesh="data:2,pipe:2", rules="batch:data;layers:pipe"), tmp_path)
    new, old = params["decoder"], saved["decoder"]["layers_N"]["mlp"]["wi_DF"]
    np.testing.assert_array_equal(new["first"]["block0"]["mlp"]["wi_DF"], old[0])
    np.testing.assert_array_equal(new["layers_N"]["mlp"]["wi_DF"], old[1:])
    with jax.set_mesh(make_mesh(WHOLE)), Checkpoints(tmp_path / "first") as checkpoints:
        again = jax.jit(spec.model(WHOLE).init)(jax.random.key(1))
        checkpoints.save(1, {"params": again, "opt_state": {}, "step": jax.numpy.asarray(1)})
    for other in (DENSE, dataclasses.replace(DENSE, first_blocks=(Block(), Block()))):
        with pytest.raises(UserError, match=r"decoder/first/block.*(none|there is no)"):
            started(other, WHOLE, tmp_path / "first")


def test_the_same_model_gets_the_same_weights(
    dense: tuple[Path, Params], log_lines: list[str]
) -> None:
    params = started(DENSE, WHOLE, dense[0])
    jax.tree.map(np.testing.assert_array_equal, params, dense[1])
    assert log_lines == [f"Run.start_from: weights of {dense[0]}, step 7."]


def test_what_does_not_fit_is_told_at_once(dense: tuple[Path, Params], tmp_path: Path) -> None:
    narrow = Block(feed_forward=Moe(experts=8, d_ff=20, expert=GATED, router=TopK(k=1)))
    other = dataclasses.replace(SPARSE, layers=6, pattern=(Block(), narrow), tied=False)
    with pytest.raises(UserError) as error:
        started(other, WHOLE, dense[0])
    text = str(error.value)
    assert "softmax_VD: there is no softmax_VD." in text
    assert (
        "decoder/layers_N/block1/mlp/wi_EDF: decoder/layers_N/mlp/wi_DF is (4, 16, 40), "
        "legal: (6, 16, 20)." in text
    )
    with pytest.raises(UserError, match="no checkpoint there"):
        started(SPARSE, WHOLE, tmp_path)


def test_a_pattern_gives_its_layers_to_one_with_biased_routers_and_shared_experts(
    tmp_path: Path,
) -> None:
    """Latent weights are split by the names of their own axes; a dense block becomes experts."""
    latent = Block(attention=Latent(latent=8, rotated=4))
    gated = dataclasses.replace(GATED, biases=True)
    moe = Moe(experts=8, expert=gated, router=SigmoidTopK(), shared_d_ff=8)
    before = dataclasses.replace(DENSE, feed_forward=gated, pattern=(latent, Block()))
    after = dataclasses.replace(before, pattern=(latent, Block(feed_forward=moe)))
    with jax.set_mesh(make_mesh(WHOLE)), Checkpoints(tmp_path) as checkpoints:
        saved = jax.jit(before.model(WHOLE).init)(jax.random.key(1))
        checkpoints.save(1, {"params": saved, "opt_state": {}, "step": jax.numpy.asarray(1)})
    layout = Layout(mesh="data:2,model:4", rules="batch:data;experts:data;latent:model")
    block = started(after, layout, tmp_path)["decoder"]["layers_N"]
    wk_NRJK = block["block0"]["attention"]["wk_RJK"]
    assert wk_NRJK.sharding.shard_shape(wk_NRJK.shape)[1] == 2
    old = saved["decoder"]["layers_N"]
    np.testing.assert_array_equal(wk_NRJK, old["block0"]["attention"]["wk_RJK"])
    wi_NEDF, wi_NDF = jax.device_get(
        (block["block1"]["mlp"]["wi_EDF"], old["block1"]["mlp"]["wi_DF"])
    )
    for expert in range(8):
        np.testing.assert_array_equal(wi_NEDF[:, expert], wi_NDF)
    new = block["block1"]["mlp"]
    assert {"bi_EF", "bg_EF", "bo_ED", "router_bias_E"} <= {*new}
    assert not np.asarray(new["bias_E"]).any()
