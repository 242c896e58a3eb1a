"""A model that compiles in a moment: the next token's logits depend on the last token alone."""

import dataclasses
from typing import Any

import jax
import numpy as np

from data.packing.rows import Counts, Rows
from layouts.layout import Layout
from models.api import Batch, Params, WeightInfo
from models.loss import Criterion, LogitOperands, LossSums, TokenLosses, softmax_loss, token_losses

VOCAB, WIDTH, LENGTH = 64, 16, 24


@dataclasses.dataclass(frozen=True)
class Bigram:
    """As `models.api.Model`: two matrices and nothing between."""

    layout: Layout
    runs_stages = False

    def trains(self, path: str) -> bool:
        return True

    def init(self, key: jax.Array) -> Params:
        def weight() -> jax.Array:
            return self.layout.random(
                lambda key, **place: jax.random.normal(key, **place),
                key, "VD", (VOCAB, WIDTH), stored=True,
            )  # fmt: skip

        return {"embed_VD": weight(), "softmax_VD": weight()}

    def weights(self) -> dict[str, WeightInfo]:
        info = WeightInfo((VOCAB, WIDTH), ("vocab", "d_model"), ("d_model",))
        return dict.fromkeys(("embed_VD", "softmax_VD"), info)

    def loss(
        self, params: Params, batch: Batch, criterion: Criterion, key: jax.Array | None = None
    ) -> LossSums:
        x_BLD = self.layout.take(params["embed_VD"], batch["inputs_BL"], "BLD")
        counted_BL = batch["segments_BL"] > 0
        output = LogitOperands(x_BLD, params["softmax_VD"])
        return softmax_loss(self.layout, criterion, 1, output, batch["targets_BL"], counted_BL)

    def token_losses(self, params: Params, batch: Batch) -> TokenLosses:
        x_BLD = self.layout.take(params["embed_VD"], batch["inputs_BL"], "BLD")
        counted_BL = batch["segments_BL"] > 0
        output = LogitOperands(x_BLD, params["softmax_VD"])
        return token_losses(self.layout, output, batch["targets_BL"], counted_BL)


def weights(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        name: rng.normal(0, 0.5, (VOCAB, WIDTH)).astype(np.float32)
        for name in ("embed_VD", "softmax_VD")
    }


def text_rows(count: int, seed: int = 0) -> Rows:
    """Rows of random tokens, two segments in each and some padding after them."""
    rng = np.random.default_rng(seed)
    segments_BL = np.zeros((count, LENGTH), np.uint16)
    for row in segments_BL:
        first, second = rng.integers(3, 12, 2)
        row[:first], row[first : first + second] = 1, 2
    targets_BL = (rng.integers(2, VOCAB, segments_BL.shape) * (segments_BL > 0)).astype(np.uint16)
    tokens = int((segments_BL > 0).sum())
    counts = Counts(lines=2 * count, words=7 * count, bytes=31 * count, tokens=tokens, rows=count)
    return Rows({"targets": targets_BL, "segments": segments_BL}, counts)


def log_probabilities(
    params: dict[str, Any], batch: dict[str, np.ndarray], scale: float = 1.0
) -> np.ndarray:
    """Log softmax of the logits, in numpy and double precision."""
    logits_BLV = scale * logits(params, batch)
    return logits_BLV - np.log(np.exp(logits_BLV).sum(-1, keepdims=True))


def logits(params: dict[str, Any], batch: dict[str, np.ndarray]) -> np.ndarray:
    embed_VD, softmax_VD = (params[name].astype(np.float64) for name in ("embed_VD", "softmax_VD"))
    return embed_VD[batch["inputs_BL"]] @ softmax_VD.T
