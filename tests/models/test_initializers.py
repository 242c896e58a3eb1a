"""Weights are drawn by their letters, with the variance of their fan-in."""

import jax
import numpy as np
import pytest
from flax import nnx

from configs.errors import UserError
from layouts.layout import Layout
from layouts.mesh import make_mesh
from models.initializers import Weights

SIZES = {"D": 50, "F": 40, "N": 3}
LAYOUT = Layout(mesh="x:2", rules="d_ff:x", param_rules="d_model:x?")


def weights() -> Weights:
    return Weights(LAYOUT, SIZES, nnx.Rngs(params=jax.random.key(0)), "bfloat16")


def test_the_variance_is_one_over_the_fan_in() -> None:
    with jax.set_mesh(make_mesh(LAYOUT)):
        wi_DF, wo_FD = weights().normal("DF", fan_in="D"), weights().normal("FD", fan_in="F")
    for array, fan_in in ((wi_DF[...], 50), (wo_FD[...], 40)):
        variance = np.var(np.asarray(array, np.float32)) * fan_in
        assert abs(variance - 1) < 4 * (2 / array.size) ** 0.5


def test_a_letter_without_an_axis_is_named() -> None:
    with pytest.raises(UserError, match=r"axes 'DOF': no axis O\.  Legal: D, F, N, and the axes"):
        weights().ones("DOF")


def test_stacked_weights_have_one_more_axis_of_other_numbers() -> None:
    with jax.set_mesh(make_mesh(LAYOUT)):
        stacked = weights().stacked("N")
        wi_NDF, scale_ND = stacked.normal("DF", fan_in="D")[...], stacked.ones("D")[...]
        table_VD = weights().with_sizes(V=7).zeros("VD")[...]
    assert wi_NDF.shape == (3, 50, 40) and scale_ND.shape == (3, 50) and table_VD.shape == (7, 50)
    assert len({float(layer[0, 0]) for layer in np.asarray(wi_NDF, np.float32)}) == 3
    assert wi_NDF.dtype == scale_ND.dtype == table_VD.dtype == "bfloat16"
    assert wi_NDF.sharding.spec == LAYOUT.place("NDF", stored=True) == jax.P(None, None, "x")
    assert table_VD.sharding.spec == jax.P(None, "x")
