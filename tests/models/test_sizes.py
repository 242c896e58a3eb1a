"""Parameter counts of the published models, counted without allocating a weight."""

import math

import jax
import pytest

from configs.load import load
from layouts.record import record
from scripts.inspections import model_of
from tests.toys import ROOT

# Shazeer et al. 2018, Table 2, in billions.
PUBLISHED = ["0.14", "0.22", "0.37", "0.67", "1.28", "2.48", "4.90"]


@pytest.mark.parametrize("billions", PUBLISHED)
def test_mesh_tensorflow_language_models_have_their_published_sizes(billions: str) -> None:
    path = f"configs/models/mtf_lm_{billions}b.gin"
    spec = model_of(load([path]))
    assert spec.vocab == 32_768
    weights = record(lambda layout: spec.model(layout).init(jax.random.key(0))).weights
    found = sum(math.prod(weight.shape) for weight in weights)
    assert f"{found / 1e9:.2f}" == billions
    assert f"{found:,} weights" in (ROOT / path).read_text()
