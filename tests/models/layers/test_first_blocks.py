"""First blocks: the beginning of a longer pattern, under other weights."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from flax import traverse_util

from configs.errors import UserError
from models.attention.multi_head import MultiHead
from models.feed_forward.moe.layer import Moe
from models.feed_forward.moe.routing import SigmoidTopK
from models.loss import Criterion, LossSums
from models.parts import Block
from models.positions.absolute import NoPositions
from models.positions.rotary import Rotary
from models.transformer import Transformer
from tests.toys import WHOLE, on_mesh, packed_rows, toy

EXPERTS = Block(feed_forward=Moe(experts=5, d_ff=9, router=SigmoidTopK(bias_rate=0.1)))
WINDOW = Block(attention=MultiHead(window=3), positions=Rotary(), norm_places="both")
BLOCKS = (WINDOW, EXPERTS, Block(), EXPERTS, Block(), EXPERTS)
LONG = toy(layers=6, positions=NoPositions(), pattern=BLOCKS)
SHORT = dataclasses.replace(LONG, first_blocks=BLOCKS[:2], pattern=BLOCKS[2:4])
ROWS = packed_rows([[8], [3, 5], [4, 4], [7]], length=8, vocab=22)


def in_one_pattern(params: Any) -> Any:
    """The weights of SHORT as those of LONG."""
    flat = {}
    for path, x in traverse_util.flatten_dict(params, sep="/").items():
        stack, *rest = path.split("/", 3)
        match rest:
            case ["first", block, name]:
                flat[f"{stack}/layers_N/{block}/{name}"] = x[None]
            case ["layers_N", block, name]:
                for repeat, layer in enumerate(x):
                    number = 2 + 2 * repeat + int(block.removeprefix("block"))
                    flat[f"{stack}/layers_N/block{number}/{name}"] = layer[None]
            case _:
                flat[path] = x
    return traverse_util.unflatten_dict(flat, sep="/")


def test_first_blocks_are_the_beginning_of_a_longer_pattern() -> None:
    def step(spec: Transformer, params: Any) -> tuple[Any, Any, Any]:
        model = spec.model(WHOLE)

        def objective(params: Any) -> tuple[jax.Array, LossSums]:
            sums = model.loss(params, batch, Criterion())
            return sums.objective, sums

        gradients, sums = jax.jit(jax.grad(objective, has_aux=True))(params)
        return sums.loss, gradients, model.update_routers(params, sums.loads)

    mesh, batch = on_mesh(WHOLE, ROWS)
    with jax.set_mesh(mesh):
        params = SHORT.model(WHOLE).init(jax.random.key(0))
        loss, *trees = step(dataclasses.replace(SHORT, scan=True, remat="full"), params)
        expected = step(LONG, in_one_pattern(params))
    assert [block.path for block in SHORT.placed_blocks("decoder")] == [
        "first/block0", "first/block1", "layers_N/block0", "layers_N/block1"
    ]  # fmt: skip
    assert SHORT.blocks_by_layer == LONG.blocks_by_layer
    actual = (loss, *map(in_one_pattern, trees))
    for value, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(value, other, atol=2e-6 * max(np.abs(other).max(), 1))
    assert np.abs(trees[1]["decoder"]["first"]["block1"]["mlp"]["bias_E"]).min() > 0


@pytest.mark.parametrize(
    ("layers", "blocks", "legal"), [(5, 2, "layers 4 or 6"), (2, 2, "layers 4"), (3, 4, "layers 6")]
)
def test_layers_are_the_first_and_repeats(layers: int, blocks: int, legal: str) -> None:
    first = BLOCKS[:blocks]
    with pytest.raises(UserError, match=f"after {blocks} first_blocks, is not .* Legal: {legal},"):
        dataclasses.replace(SHORT, layers=layers, first_blocks=first)
