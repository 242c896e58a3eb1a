"""What optimizers share: clipping and weight decay."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import traverse_util

from layouts.mesh import make_mesh
from models.attention.multi_head import MultiHead
from models.positions.relative import Relative
from models.transformer import Transformer
from tests.toys import WHOLE
from tests.trainer.optimizers.updates import assert_same, trees, updated
from trainer.optimizers import chain
from trainer.optimizers.adamw import AdamW


def test_one_global_norm_clips_all_weights_together() -> None:
    """Halving every gradient changes nothing once the norm is beyond the clip."""
    layers, large = trees(0), trees(1)
    half = [{name: x / 2 for name, x in layer.items()} for layer in large]
    optimizer = AdamW(clip_global_norm=1.0, epsilon=1.0)  # epsilon makes Adam's step see sizes
    assert_same(updated(optimizer, layers, [half], True), updated(optimizer, layers, [large], True))
    free = AdamW(clip_global_norm=None, epsilon=1.0)
    actual, other = (updated(free, layers, [g], True)[0]["scale_D"] for g in (half, large))
    assert np.abs(actual - other).max() > 1e-7


def test_weight_decay_takes_weights_that_a_product_sums_over() -> None:
    """A model's matrices and tables decay; its scales and biases do not."""
    spec = Transformer(
        layers=1, d_model=8, d_ff=14, heads=2, d_kv=4, vocab=22,
        attention=MultiHead(biases="all", qk_norm=True), positions=Relative(),
    )  # fmt: skip
    model = spec.model(WHOLE)
    with jax.set_mesh(make_mesh(WHOLE)):
        params = jax.tree.map(jnp.ones_like, model.init(jax.random.key(0)))
    decay = chain.finish([optax.scale(0.0)], 0.5, lambda step: 1.0, model.weights())
    updates, _ = decay.update(params, decay.init(params), params)
    decayed = {path for path, x in traverse_util.flatten_dict(updates, sep="/").items() if x.any()}
    attention = "decoder/layers_N/attention"
    assert decayed == {
        "embed_VD", "decoder/layers_N/mlp/wi_DF", "decoder/layers_N/mlp/wo_FD",
        *(f"{attention}/{name}" for name in ("wq_DJQK", "wk_DJK", "wv_DJK", "wo_JQKD")),
        f"{attention}/bias/bias_RJQ",
    }  # fmt: skip
