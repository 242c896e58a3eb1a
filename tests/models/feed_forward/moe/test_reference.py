"""Layers of experts against Hugging Face's, with the weights that they were initialised with.

They need the test extra: pip install -e ".[test]".
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from layouts.mesh import make_mesh
from models.feed_forward.mlp import Mlp
from models.feed_forward.moe.layer import Dispatch, Moe, MoeLayer
from models.feed_forward.moe.routing import TopK
from models.initializers import Weights
from tests.toys import WHOLE, toy

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

EXPERTS, WIDTH, HIDDEN, LENGTH = 5, 10, 14, 24
SPEC = toy()


def output(moe: Moe, weights: dict[str, np.ndarray], x_BLD: np.ndarray) -> np.ndarray:
    """What our layer with these weights makes of the tokens."""
    with jax.set_mesh(make_mesh(WHOLE)):
        initial = Weights(WHOLE, SPEC.sizes, nnx.Rngs(params=jax.random.key(0)), "float32")
        graph, params = nnx.split(MoeLayer(moe, SPEC, WHOLE, initial))
        assert {path[0]: leaf.shape for path, leaf in nnx.to_flat_state(params)} == {
            name: weight.shape for name, weight in weights.items()
        }
        nnx.replace_by_pure_dict(params, {name: jnp.asarray(w) for name, w in weights.items()})
        segments_BL = jnp.ones(x_BLD.shape[:2], jnp.int32)
        y_BLD, _ = jax.jit(lambda x_BLD: nnx.merge(graph, params)(x_BLD, segments_BL))(x_BLD)
    return np.asarray(y_BLD)


def test_dropless_top_2_is_mixtrals() -> None:
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        hidden_size=WIDTH, intermediate_size=HIDDEN, num_local_experts=EXPERTS,
        num_experts_per_tok=2,
    )  # fmt: skip
    reference = MixtralSparseMoeBlock(config).eval()
    for weight in reference.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    wg_EFD, wi_EFD = np.split(reference.experts.gate_up_proj.detach().numpy(), 2, axis=1)
    weights = {
        "router_DE": reference.gate.weight.detach().numpy().T,
        "wg_EDF": np.swapaxes(wg_EFD, 1, 2),
        "wi_EDF": np.swapaxes(wi_EFD, 1, 2),
        "wo_EFD": np.swapaxes(reference.experts.down_proj.detach().numpy(), 1, 2),
    }
    moe = Moe(
        experts=EXPERTS,
        router=TopK(k=2, normalises=True),
        dispatch="dropless",
        expert=Mlp(activation="silu", gated=True),
    )
    x_BLD = np.random.default_rng(1).normal(size=(3, LENGTH, WIDTH)).astype(np.float32)
    with torch.inference_mode():
        expected_BLD = reference(torch.from_numpy(x_BLD)).numpy()
    assert np.abs(expected_BLD).max() > 0.1
    np.testing.assert_allclose(output(moe, weights, x_BLD), expected_BLD, rtol=0, atol=1e-4)


@pytest.mark.parametrize("dispatch", ["einsum", "gather"])
@pytest.mark.parametrize("factor", [0.5, 5.0], ids=["overflowing", "roomy"])
def test_top_1_with_capacity_is_the_switchs(dispatch: Dispatch, factor: float) -> None:
    """On tokens that overflow too: both leave them to the residual."""
    from transformers.models.switch_transformers.modeling_switch_transformers import (
        SwitchTransformersSparseMLP,
    )

    torch.manual_seed(0)
    router = TopK(k=1, evaluation_capacity_factor=factor, least_capacity=1)
    capacity = router.capacity(LENGTH, EXPERTS, training=False)
    config = transformers.SwitchTransformersConfig(
        d_model=WIDTH, d_ff=HIDDEN, num_experts=EXPERTS, expert_capacity=capacity
    )
    reference = SwitchTransformersSparseMLP(config).eval()
    for weight in reference.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    experts = [reference.experts[f"expert_{i}"] for i in range(EXPERTS)]
    weights = {
        "router_DE": reference.router.classifier.weight.detach().numpy().T,
        "wi_EDF": np.stack([expert.wi.weight.detach().numpy().T for expert in experts]),
        "wo_EFD": np.stack([expert.wo.weight.detach().numpy().T for expert in experts]),
    }
    moe = Moe(experts=EXPERTS, router=router, dispatch=dispatch)
    x_BLD = np.random.default_rng(1).normal(size=(3, LENGTH, WIDTH)).astype(np.float32)
    with torch.inference_mode():
        expected_BLD = reference(torch.from_numpy(x_BLD)).numpy()
    assert np.any(np.all(expected_BLD == 0, axis=-1)) == (factor < 1)
    found_BLD = output(moe, weights, x_BLD)
    np.testing.assert_allclose(found_BLD, expected_BLD, rtol=0, atol=1e-4)
