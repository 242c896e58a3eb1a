"""Warnings of layers that drop tokens or use their experts unevenly."""

import numpy as np
import pytest

from models.moe.routing import Top2
from tests.toys import TOY
from tests.trainer.metrics.test_expert_load import COUNTS, stacked
from tests.trainer.planning.runs import TASK
from trainer.metrics.expert_load import layer_stats
from trainer.metrics.router_warnings import RouterWarnings, warnings
from trainer.observers import StepResult
from trainer.run import Run


def test_a_layer_that_drops_or_overloads_is_named() -> None:
    dropping = {"decoder 1": layer_stats(COUNTS)}
    router = Top2(capacity_factor=1.5, aux_loss=0.02)
    assert warnings(dropping, router) == [
        "decoder 1: 40% of the choices number 2 found no place.  "
        "Raise Top2.capacity_factor (now 1.5), or Top2.aux_loss (now 0.02)."
    ]
    one = COUNTS._replace(kept_e=np.eye(16)[3] * 10, kept_i=np.array([10.0, 10.0]))
    assert warnings({"encoder 0": layer_stats(one)}, router) == [
        "encoder 0: one expert has 16.0 times its even share of the tokens.  "
        "Raise Top2.aux_loss (now 0.02)."
    ]


def test_a_run_warns_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    observer = RouterWarnings()
    observer.on_start(Run(model=TOY, task=TASK, steps=250, batch_sequences=8), 0)
    for step in (99, 100, 101, 250):
        observer.on_step(StepResult(step, {"step": step}, {"decoder": stacked(COUNTS)}))
    steps = [record.args[0] for record in caplog.records if record.args]
    assert steps == [100, 250]
