"""Warnings of layers that drop tokens or use their experts unevenly."""

import jax
import numpy as np
import pytest

from configs.load import load
from layouts.mesh import make_mesh
from models.feed_forward.moe.routing import Top2
from models.loss import Criterion
from scripts.commands.inspect.layout import model_of
from tests.toys import TOY, WHOLE
from tests.trainer.metrics.test_expert_load import COUNTS, stacked
from tests.trainer.planning.runs import TASK
from trainer.metrics.expert_load import layer_stats, stats_by_layer
from trainer.metrics.writers import RouterWarnings, remedy, warnings
from trainer.observers import StepResult
from trainer.run import Run


def test_a_layer_that_drops_or_overloads_is_named() -> None:
    dropping = {"decoder 1": layer_stats(COUNTS)}
    router = Top2(capacity_factor=1.5, aux_loss=0.02)
    assert warnings(dropping, router) == [
        "decoder 1: 40% of the choices number 2 were dropped.  "
        "Raise Top2.capacity_factor (now 1.5), or Top2.aux_loss (now 0.02)."
    ]
    one = COUNTS._replace(kept_e=np.eye(16)[3] * 10, kept_i=np.array([10.0, 10.0]))
    assert warnings({"encoder 0": layer_stats(one)}, router) == [
        "encoder 0: one expert has 16.0 times its even share of the tokens.  "
        "Raise Top2.aux_loss (now 0.02)."
    ]


def test_the_tiny_model_of_experts_drops_little_before_it_is_balanced() -> None:
    """With slots for an even share alone, an untrained router leaves out too many choices."""
    spec = model_of(load(["configs/models/tiny_moe.gin"]))
    model = spec.model(WHOLE)
    tokens = np.random.default_rng(0).integers(0, 4096, (4, 128), np.int32)
    ones, places = np.ones_like(tokens), np.tile(np.arange(128, dtype=np.int32), (4, 1))
    batch = dict(inputs_BL=tokens, targets_BL=tokens, segments_BL=ones, positions_BL=places)
    with jax.set_mesh(make_mesh(WHOLE)):
        params = model.init(jax.random.key(0))
        sums = jax.jit(model.loss, static_argnums=2)(params, batch, Criterion(), jax.random.key(1))
    layers = stats_by_layer(sums.loads)
    assert len(layers) == 2 and not warnings(layers, spec.router)


def test_a_run_warns_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    observer = RouterWarnings()
    observer.on_start(Run(model=TOY, task=TASK, steps=250, batch_sequences=8), 0)
    for step in (99, 100, 101, 250):
        observer.on_step(
            StepResult(step, {"step": step}, {"decoder": {"layers_N": stacked(COUNTS)}})
        )
    steps = [record.args[0] for record in caplog.records if record.args]
    assert steps == [100, 250]


def test_a_remedy_names_the_setting_and_its_value() -> None:
    assert remedy(Top2(aux_loss=0.02), "aux_loss") == "Top2.aux_loss (now 0.02)"
