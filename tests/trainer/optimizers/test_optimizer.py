"""A law of every optimizer."""

from typing import Any

import pytest

from tests.trainer.optimizers.updates import (
    assert_same,
    trees,
    updated,
)
from trainer.optimizers.adafactor import Adafactor
from trainer.optimizers.adamw import AdamW


@pytest.mark.parametrize(
    "optimizer",
    [AdamW(weight_decay=0.1), Adafactor(factored_from=8, momentum=0.9, weight_decay=0.1,
                                        clip_global_norm=2.0)],
    ids=["AdamW", "Adafactor"],
)  # fmt: skip
def test_the_result_does_not_depend_on_how_layers_are_stored(optimizer: Any) -> None:
    layers, gradients = trees(0), [trees(seed) for seed in range(1, 6)]
    expected = updated(optimizer, layers, gradients, False)
    assert_same(updated(optimizer, layers, gradients, True), expected)
