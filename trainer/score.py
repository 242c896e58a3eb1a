"""Log-likelihood of each line of a text."""

import dataclasses
from collections.abc import Callable

import jax
import numpy as np
from jax.sharding import Mesh

from data.cache import Rows
from models.api import Model, Params
from trainer.evaluate import in_order
from trainer.feed import placement


@dataclasses.dataclass(frozen=True)
class Score:
    """The natural log-likelihood of one line with its end, and what it is made of.

    `words` counts the end of the line as one word.
    """

    log_likelihood: float
    words: int
    tokens: int


token_losses = jax.jit(
    lambda model, params, batch: model.token_losses(params, batch), static_argnums=0
)
