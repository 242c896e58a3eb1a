"""Holds the sizes of a Transformer, which all of its parts share."""

from configs.errors import UserError
from configs.spec import Count, CountOrZero, Fraction, abstract_spec
from models.api import ModelSpec
from models.precision import Precision


@abstract_spec
class Sizes(ModelSpec):
    """Holds the settings of a Transformer that its parts read."""

    layers: Count
    """Layers of the decoder."""
    encoder_layers: CountOrZero = 0
    """Layers of the encoder; 0 makes a decoder-only model."""
    d_model: Count
    """Width of the residual stream."""
    d_ff: Count
    """Width of a dense feed-forward layer."""
    heads: Count
    """Query heads."""
    kv_heads: Count | None = None
    """Key/value heads. None: the same as heads."""
    d_kv: Count
    """Width of one head."""
    length: Count = 256
    """Maximum row length with @Learned() positions. Other positions have no limit."""
    dropout: Fraction = 0.0
    """Dropout rate of the embeddings, of the residual branches and, unless Mlp.dropout is set,
    inside feed-forward layers."""
    precision: Precision = Precision()
    """Types of stored weights and of computation."""

    def __post_init__(self) -> None:
        if self.heads % (self.kv_heads or self.heads):
            raise UserError(
                f"Transformer.heads = {self.heads} is not a multiple of kv_heads = {self.kv_heads}."
                "  Legal: kv_heads that divide heads."
            )

    @property
    def has_encoder(self) -> bool:
        return self.encoder_layers > 0

    @property
    def queries(self) -> int:
        """Returns the query heads per key/value head."""
        return self.heads // (self.kv_heads or self.heads)

    @property
    def sizes(self) -> dict[str, int]:
        """Returns the size of each common axis of the weights, by letter."""
        return {
            "V": self.vocab_rows, "N": self.layers, "D": self.d_model, "F": self.d_ff,
            "K": self.d_kv, "J": self.heads // self.queries, "Q": self.queries,
            "L": self.length,
        }  # fmt: skip
