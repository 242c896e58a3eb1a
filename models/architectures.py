"""Names the architectures that gin files can choose.

Settings load in a second because a network's modules, and flax with them, load only when a model
is made.
"""

from collections.abc import Mapping

from configs.spec import spec
from layouts.layout import Layout
from models.api import Model
from models.spec import TransformerSpec


@spec
class Transformer(TransformerSpec):
    """Makes a decoder, or encoder and decoder.  Vaswani et al. 2017; norms before each part."""

    def attention_choices(self, layout: Layout, lengths: Mapping[str, int]) -> dict[str, str]:
        from models.attention.flash import Call, choose
        from models.layers.pipeline import inside_stages

        layout = inside_stages(layout)
        length, memory = lengths["targets_BL"], lengths.get("inputs_BM")
        calls = {"decoder": Call(self, layout, (length, length), training=True)}
        if memory is not None:
            calls["encoder"] = Call(self, layout, (memory, memory), training=True)
            calls["source"] = Call(self, layout, (length, memory), is_cross=True, training=True)
        return {place: str(choose(call)) for place, call in calls.items()}

    def model(self, layout: Layout) -> Model:
        from models.transformer import TransformerModel

        return TransformerModel(self, layout)
