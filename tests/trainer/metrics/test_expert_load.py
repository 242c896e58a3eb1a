"""Numbers of layers with experts, from counts that can be checked by hand."""

import numpy as np
import pytest

from models.feed_forward.moe.routing import Load
from trainer.metrics.expert_load import layer_stats, scalars, stats_by_layer

COUNTS = Load(
    aux=np.array(15.0),
    z=np.array(40.0),
    entropy=np.array(5.0),
    kept_e=np.array([6.0, 6.0, 4.0, 0.0]),
    chosen_i=np.array([10.0, 10.0]),
    kept_i=np.array([10.0, 6.0]),
    tokens=np.array(10.0),
)


def stacked(*loads: Load) -> Load:
    return Load(*(np.stack(fields) for fields in zip(*loads, strict=True)))


def test_shares_and_means() -> None:
    layer = layer_stats(COUNTS)
    assert layer["load"] == [0.375, 0.375, 0.25, 0.0]
    assert layer["dropped"] == pytest.approx([0.0, 0.4])
    assert (layer["idle"], layer["entropy"], layer["aux"], layer["z"]) == (1, 0.5, 1.5, 4.0)


def test_layers_are_numbered_as_they_are_run() -> None:
    loads = {
        "decoder": {
            "first/block0": None,
            "first/block1": stacked(COUNTS),
            "layers_N/block0": None,
            "layers_N/block1": stacked(COUNTS, COUNTS),
        },
        "encoder": {"layers_N": stacked(COUNTS, COUNTS, COUNTS)},
    }
    decoder = ["decoder 1", "decoder 3", "decoder 5"]
    assert list(stats_by_layer(loads)) == [*decoder, "encoder 0", "encoder 1", "encoder 2"]
    assert stats_by_layer({}) == {} and stats_by_layer({"decoder": {"layers_N": None}}) == {}


def test_curves() -> None:
    layers = {"decoder 1": layer_stats(COUNTS)}
    assert scalars(layers)["decoder 1/dropped_2"] == pytest.approx(0.4)
    assert scalars(layers)["decoder 1/largest_load"] == 0.375
