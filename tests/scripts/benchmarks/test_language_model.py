"""The shapes of the benchmarks count the FLOPs that a trace counts."""

import jax
import numpy as np

from layouts.cost.dataflow import total_flops
from layouts.layout import Layout
from layouts.mesh import make_mesh
from models.loss import Criterion
from scripts.benchmarks.language_model import SHAPES, Shape, transformer


def traced_flops(shape: Shape) -> int:
    layout = Layout(mesh="data:1", rules="")
    model = transformer(shape).model(layout)
    batch = {
        name: np.ones((shape.rows, shape.length), np.int32)
        for name in ("inputs_BL", "targets_BL", "segments_BL", "positions_BL")
    }
    with jax.set_mesh(make_mesh(layout)):
        params = jax.eval_shape(model.init, jax.random.key(0))
        gradient = jax.grad(lambda params: model.loss(params, batch, Criterion()).objective)
        return total_flops(jax.make_jaxpr(gradient)(params).jaxpr)


def test_flops_are_those_of_the_trace_but_for_the_half_that_causality_leaves_out() -> None:
    shape = SHAPES["toy"]
    masked = 3 * shape.tokens * 2 * shape.layers * shape.length * shape.d_model
    assert traced_flops(shape) == shape.step_flops + masked


def test_experts_cost_as_much_as_the_layer_that_they_replace() -> None:
    dense, experts = SHAPES["1.3b"], SHAPES["1.3b_experts"]
    assert dense.step_flops == experts.step_flops
    [moe] = transformer(experts).moes
    assert moe.router.choices * moe.d_ff == dense.d_ff
