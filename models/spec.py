"""Settings of a Transformer: the part of a model that a gin file decides."""

from typing import Literal

from configs.errors import UserError
from configs.spec import Count, Fraction, spec
from layouts.layout import Layout
from models.api import Model, ModelSpec
from models.weights import Precision

Activation = Literal["relu", "gelu", "silu"]
Positions = Literal["learned", "sinusoidal", "relative", "rotary"]


@spec
class Transformer(ModelSpec):
    """A decoder-only Transformer.  Vaswani et al. 2017; norms before each part."""

    layers: Count
    d_model: Count
    d_ff: Count
    heads: Count
    kv_heads: Count | None = None
    """Key/value heads; as many as heads where it is None."""
    d_kv: Count
    activation: Activation = "relu"
    gated: bool = False
    positions: Positions = "learned"
    length: Count = 256
    """Places in the learned position table; no longer row can be trained or decoded with it."""
    buckets: Count = 32
    max_distance: Count = 128
    tied: bool = True
    """One matrix for the embedding and the softmax."""
    combined_qkv: bool = False
    """One product for queries, keys and values; the stored weights stay apart."""
    dropout: Fraction = 0.0
    attention_dropout: Fraction = 0.0
    scan: bool = True
    """Compile one layer and loop over it, instead of all layers in a row.  Same results."""
    remat: Literal["none", "dots", "full"] = "none"
    """What the backward pass computes again: nothing, all but matrix products, or everything."""
    attention_chunks: Count = 1
    """Slices of queries; each leaves out the memory that lies ahead of it.  Same results."""
    loss_chunks: Count = 1
    """Slices along the row in which logits are made, so that they never exist all at once."""
    precision: Precision = Precision()

    def __post_init__(self) -> None:
        if self.heads % (self.kv_heads or self.heads):
            raise UserError(
                f"Transformer.heads = {self.heads} is no multiple of kv_heads = {self.kv_heads}."
                "  Legal: kv_heads that divide heads."
            )
        if self.positions == "rotary" and self.d_kv % 2:
            raise UserError(f"Transformer.d_kv = {self.d_kv}: rotary positions need an even width.")
        if self.positions == "sinusoidal" and self.d_model % 2:
            raise UserError(f"Transformer.d_model = {self.d_model}: sinusoids need an even width.")

    def model(self, layout: Layout) -> Model:
        from models.transformer import TransformerModel  # it is built of parts that read this spec

        return TransformerModel(self, layout)

    @property
    def most_places(self) -> int | None:
        return self.length if self.positions == "learned" else None

    @property
    def queries(self) -> int:
        """Query heads per key/value head."""
        return self.heads // (self.kv_heads or self.heads)

    @property
    def sizes(self) -> dict[str, int]:
        """Size of each axis of the weights, by letter."""
        return {
            "V": self.vocab, "N": self.layers, "D": self.d_model, "F": self.d_ff, "K": self.d_kv,
            "J": self.heads // self.queries, "Q": self.queries, "L": self.length, "R": self.buckets,
        }  # fmt: skip
