"""Settings that change speed alone change no number beyond round-off, whatever else is set.

Models and such settings are drawn at random, the same ones in each run.
"""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest

from layouts.mesh import make_mesh
from models.attention.multi_head import MultiHead
from models.feed_forward.mlp import Mlp
from models.feed_forward.moe.layer import Moe
from models.feed_forward.moe.routing import Top2, TopK
from models.loss import Criterion
from models.parts import Block, Positions
from models.positions.absolute import Learned, Sinusoidal
from models.positions.relative import Relative
from models.positions.rotary import Rotary
from models.transformer import Transformer
from tests.toys import FLOAT64, ROUND_OFF, WHOLE, pair_rows, toy
from trainer.feed import BatchSharding
from trainer.optimizers.adamw import AdamW
from trainer.step import TrainStepSpec, add_microbatches

BATCH = pair_rows([[3, 5], [8], [2, 2, 2], [1]], [[4, 2], [6], [1, 3, 1], [5]], 8, 22)
pytestmark = pytest.mark.usefixtures("float64")
MODELS, CASES = 3, 4
POSITIONS: tuple[type[Positions], ...] = (Learned, Sinusoidal, Relative, Rotary)


def random_model(rng: np.random.Generator) -> Transformer:
    """A model with the plainest settings, in which no expert drops a token."""
    kind = POSITIONS[rng.integers(len(POSITIONS))]
    settings: dict[str, Any] = {
        "kv_heads": int(rng.choice([1, 3, 6])),
        "feed_forward": (mlp := Mlp(gated=bool(rng.integers(2)))),
        "tied": bool(rng.integers(2)),
    }
    relative = Relative(shared=bool(rng.integers(2)))
    settings |= {
        "positions": relative if kind is Relative else kind(),
        "encoder_layers": int(rng.integers(2)),
        "dropout": float(rng.choice([0.0, 0.2])),
        "precision": FLOAT64,
    }
    if settings["dropout"]:
        settings["attention"] = MultiHead(dropout=float(rng.choice([0.0, 0.3])))
    if rng.integers(2):
        is_random = settings["dropout"] > 0
        routers = Top2(capacity_factor=5.0, random_second=is_random), TopK(k=3, capacity_factor=5.0)
        router = routers[rng.integers(2)]
        moe = Moe(experts=5, d_ff=9, router=router, dispatch="einsum", expert=mlp)
        dense, experts = Block(), Block(feed_forward=moe)
        settings["pattern"] = (dense, experts) if rng.integers(2) else (experts,)
        settings["encoder_pattern"] = (experts,) if rng.integers(2) else (dense,)
    return toy(**settings)


def with_dispatch(pattern: tuple[Block, ...], dispatch: str) -> tuple[Block, ...]:
    """The same layers, whose experts get their tokens in another way."""
    return tuple(
        Block(feed_forward=dataclasses.replace(block.feed_forward, dispatch=dispatch))
        if isinstance(block.feed_forward, Moe)
        else block
        for block in pattern
    )


def random_settings(rng: np.random.Generator, model: Transformer) -> tuple[Transformer, int]:
    """The same model with other settings of speed, and a number of microbatches."""
    faster: dict[str, Any] = {
        "scan": bool(rng.integers(2)),
        "remat": str(rng.choice(["none", "dots", "full"])),
    }
    chunks = int(rng.integers(1, 5))
    faster["loss_chunks"] = int(rng.integers(1, 5))
    faster["attention"] = dataclasses.replace(
        model.attention, chunks=chunks, combined_qkv=bool(rng.integers(2))
    )
    if model.moes:
        dispatch = str(rng.choice(["einsum", "gather", "dropless"]))
        for name in ("pattern", "encoder_pattern"):
            faster[name] = with_dispatch(getattr(model, name), dispatch)
    # Each microbatch draws random bits of its own.
    microbatches = 1 if model.dropout else int(rng.choice([1, 2, 4]))
    return dataclasses.replace(model, **faster), microbatches


@functools.cache
def sums_and_gradients(model: Transformer, microbatches: int) -> dict[str, np.ndarray]:
    """What one step adds up over its microbatches, by path."""
    criterion = Criterion(label_smoothing=0.1, z_loss=1e-2)
    program = TrainStepSpec(model.model(WHOLE), AdamW(), criterion, 10, 3, microbatches)
    mesh = make_mesh(WHOLE)
    batch = BatchSharding(WHOLE, mesh, 4, microbatches).to_global_arrays(BATCH)

    def step(params: Any, batch: Any) -> Any:
        return add_microbatches(program, params, batch, jax.random.key(5))

    with jax.set_mesh(mesh):
        params = jax.device_get(jax.jit(program.model.init)(jax.random.key(0)))
        rng = np.random.default_rng(1)  # norms and biases are ones and zeros without it
        params = jax.tree.map(lambda w: w + rng.normal(0, 0.1, w.shape).astype(w.dtype), params)
        leaves = jax.tree_util.tree_leaves_with_path(jax.jit(step)(params, batch))
    return {jax.tree_util.keystr(path, simple=True): np.asarray(leaf) for path, leaf in leaves}


@pytest.mark.few(2)
@pytest.mark.parametrize("case", range(CASES))
def test_settings_of_speed_change_no_number(case: int) -> None:
    model = random_model(np.random.default_rng(case % MODELS))
    faster, microbatches = random_settings(np.random.default_rng([1, case]), model)
    expected, computed = sums_and_gradients(model, 1), sums_and_gradients(faster, microbatches)
    assert computed.keys() == expected.keys()
    for path, array in expected.items():
        tolerance = ROUND_OFF * np.abs(array).max()
        assert tolerance > 0 or path.startswith("1"), path  # sums after gradients: none correct
        np.testing.assert_allclose(
            computed[path], array, rtol=0, atol=tolerance, err_msg=f"{path}: {faster}"
        )
