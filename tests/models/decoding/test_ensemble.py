"""Several weights that decode together: the mean of their probabilities."""

import jax
import jax.numpy as jnp
import numpy as np

from layouts.mesh import make_mesh
from models.decoding.ensemble import Ensemble, as_ensemble
from models.transformer import TransformerModel
from tests.toys import WHOLE, toy

MODEL = TransformerModel(toy(), WHOLE)


def logits_after(model: object, params: object) -> np.ndarray:
    """The logits after three tokens that are fed at once."""
    tokens_BL = jnp.array([[0, 7, 5], [0, 3, 9]])
    positions_BL = jnp.tile(jnp.arange(3), (2, 1))
    mask_BLM = jnp.tile(jnp.tril(jnp.ones((3, 3), bool)), (2, 1, 1))
    prepared, first = model.prepare(params), jnp.zeros((), jnp.int32)
    cache = model.init_cache(prepared, None, 2, 3)
    return model.step(prepared, cache, tokens_BL, positions_BL, mask_BLM, first)[1]


def test_an_ensemble_averages_probabilities() -> None:
    with jax.set_mesh(make_mesh(WHOLE)):
        members = [jax.jit(MODEL.init)(jax.random.key(seed)) for seed in range(3)]
        model, params = as_ensemble(MODEL, members)
        assert isinstance(model, Ensemble)
        together = jax.jit(lambda params: logits_after(model, params))(params)
        each = [jax.jit(lambda params: logits_after(MODEL, params))(member) for member in members]
    mean = np.mean([jax.nn.softmax(logits) for logits in each], axis=0)
    np.testing.assert_allclose(np.exp(together), mean, rtol=1e-5)
    assert np.abs(mean - jax.nn.softmax(each[0])).max() > 1e-2


def test_one_member_is_no_ensemble() -> None:
    params = {"embed_VD": jnp.zeros((22, 10))}
    assert as_ensemble(MODEL, [params]) == (MODEL, params)
