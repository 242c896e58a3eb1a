"""The second moments of Adafactor."""

import jax
import jax.numpy as jnp

from tests.trainer.optimizers.updates import LAYERS, transform_of
from trainer.optimizers.adafactor import Adafactor


def test_adafactor_takes_weights_of_more_numbers_than_int32_has() -> None:
    tree = {"wi_EDF": jax.ShapeDtypeStruct((2048, 1024, 8192), jnp.float32)}  # GShard's 600B
    transform = transform_of(Adafactor(), tree)
    opt_state = jax.eval_shape(transform.init, tree)
    updates, _ = jax.eval_shape(transform.update, tree, opt_state, tree)
    assert updates["wi_EDF"].shape == tree["wi_EDF"].shape


def test_adafactor_keeps_rows_and_columns_in_place_of_the_square() -> None:
    """Of every layer and every expert apart: moments lie where the experts do."""
    layers = {"wi_DF": jnp.zeros((LAYERS, 10, 14)), "wo_EFD": jnp.zeros((LAYERS, 16, 14, 10))}
    params = {"layers_N": layers, "embed_VD": jnp.zeros((22, 9))}
    opt_state = jax.eval_shape(transform_of(Adafactor(factored_from=9), params).init, params)
    sizes = sorted(
        leaf.shape
        for path, leaf in jax.tree_util.tree_leaves_with_path(opt_state)
        if "count" not in jax.tree_util.keystr(path) and leaf.shape[-1] > 1
    )
    assert sizes == [(3, 10), (3, 14), (3, 16, 10), (3, 16, 14), (9,), (22,)]
