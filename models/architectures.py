"""The architectures that gin files can name.

Settings load in a second because a network's modules, and flax with them, load only when a model
is made.
"""

from configs.spec import spec
from layouts.layout import Layout
from models.api import Model
from models.spec import TransformerSpec


@spec
class Transformer(TransformerSpec):
    """A decoder, or an encoder and a decoder.  Vaswani et al. 2017; norms before each part."""

    def model(self, layout: Layout) -> Model:
        from models.transformer import TransformerModel

        return TransformerModel(self, layout)
