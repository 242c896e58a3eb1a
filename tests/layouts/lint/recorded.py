"""Records of small models, each made once."""

import functools

import jax
import jax.numpy as jnp

from layouts.layout import Layout
from layouts.lint.recorder import Record, record
from models.api import Batch, Params
from models.loss import Criterion
from models.transformer import Transformer, TransformerModel

NAMES = ("inputs_BL", "targets_BL", "segments_BL", "positions_BL")
SOURCE_NAMES = ("inputs_BM", "segments_BM", "positions_BM")


def zeros(layout: Layout, rows: int, length: int, *, has_encoder: bool = False) -> Batch:
    names = (*NAMES, *SOURCE_NAMES) if has_encoder else NAMES
    return {name: layout.reshard(jnp.zeros((rows, length), jnp.int32), name[-2:]) for name in names}


@functools.cache
def recorded(spec: Transformer, rows: int, length: int) -> Record:
    """What the training loss of a batch makes."""

    def trace(layout: Layout) -> Params:
        model = TransformerModel(spec, layout)
        params = model.init(jax.random.key(0))
        batch = zeros(layout, rows, length, has_encoder=spec.has_encoder)
        model.loss(params, batch, Criterion(), jax.random.key(1))
        return params

    return record(trace)
