"""What optimizers share: clipping and weight decay."""

import numpy as np

from tests.trainer.optimizers.updates import assert_same, trees, updated
from trainer.optimizers.adamw import AdamW
from trainer.optimizers.chain import is_matrix


def test_one_global_norm_clips_all_weights_together() -> None:
    """Halving every gradient changes nothing once the norm is beyond the clip."""
    layers, large = trees(0), trees(1)
    half = [{name: x / 2 for name, x in layer.items()} for layer in large]
    optimizer = AdamW(clip_global_norm=1.0, epsilon=1.0)  # epsilon makes Adam's step see sizes
    assert_same(updated(optimizer, layers, [half], True), updated(optimizer, layers, [large], True))
    free = AdamW(clip_global_norm=None, epsilon=1.0)
    actual, other = (updated(free, layers, [g], True)[0]["scale_D"] for g in (half, large))
    assert np.abs(actual - other).max() > 1e-7


def test_weight_decay_reads_letters() -> None:
    names = {"embed_VD": True, "bias_RJQ": True, "scale_D": False, "plain": False}
    params = {**dict.fromkeys(names, 0), "layers_N": dict.fromkeys(names, 0)}
    assert is_matrix(params) == {**names, "layers_N": names}
