"""AdamW against a numpy version written from the paper."""

import numpy as np
import pytest

from tests.trainer.optimizers.updates import assert_same, trees, updated
from trainer.optimizers.adamw import AdamW
from trainer.optimizers.schedules import Constant


def adamw(x: np.ndarray, gradients: list[np.ndarray], rate: float, decay: float) -> np.ndarray:
    """Loshchilov and Hutter 2019, algorithm 2; beta 0.9 and 0.98."""
    m = v = 0.0
    for t, gradient in enumerate(gradients, 1):
        m = 0.9 * m + 0.1 * gradient
        v = 0.98 * v + 0.02 * gradient**2
        unbiased = (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.98**t)) + 1e-8)
        x = x - rate * (unbiased + decay * x)
    return x


@pytest.mark.parametrize("stacked", [True, False], ids=["stacked", "apart"])
def test_adamw_is_the_papers_and_decays_matrices_only(stacked: bool) -> None:
    optimizer = AdamW(schedule=Constant(peak=0.01), weight_decay=0.1, clip_global_norm=None)
    layers, gradients = trees(0), [trees(seed) for seed in range(1, 11)]
    decays = {"embed_VD": 0.1, "wk_DJK": 0.1, "wi_EDF": 0.1, "scale_D": 0.0, "tiny_D": 0.0}
    expected = [
        {
            name: adamw(x, [g[i][name] for g in gradients], 0.01, decays[name])
            for name, x in layer.items()
        }
        for i, layer in enumerate(layers)
    ]
    assert_same(updated(optimizer, layers, gradients, stacked), expected)
