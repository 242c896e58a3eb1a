"""Names the architectures that gin files can choose.

Settings load in a second because a network's modules, and flax with them, load only when a model
is made.
"""

from configs.spec import spec
from layouts.layout import Layout
from models.api import Model
from models.spec import TransformerSpec


@spec
class Transformer(TransformerSpec):
    """Makes a decoder, or encoder and decoder.  Vaswani et al. 2017; norms before each part."""

    def model(self, layout: Layout) -> Model:
        from models.transformer import TransformerModel

        return TransformerModel(self, layout)
