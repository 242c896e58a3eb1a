"""Lists Hugging Face's families of models that Meshloom's Transformer can express.

A table of families.toml describes the config.json of a family; tensors.toml names its tensors.
"""

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from models.attention.multi_head import AttentionBiases, QkNormOver
from models.feed_forward.mlp import Activation
from models.feed_forward.moe.routing import SigmoidTopK, TopK
from models.norms import LayerNorm, RmsNorm
from models.parts import NormPlaces, Positions
from models.positions.absolute import Learned, Sinusoidal
from models.positions.relative import Relative

Settings = dict[str, Any]
Names = Mapping[str, Sequence[str]]
"""Maps the path of a weight to its tensor's name and axes.  A tensor's axis is spelled with the
letters of the weight's axes that it merges."""

QueryPath = Literal["direct", "compressed"]

SOFTMAX = "lm_head.weight"


class Tensors(NamedTuple):
    """Names the tensors of a family; names in layers are relative to `layer`.

    In names, {stack} is encoder or decoder, {layer} and {expert} are numbers, and {last} is the
    number of attentions in a layer.
    """

    embedding: str
    final_norm: str
    """The norm at the end of each stack; empty if there is none."""
    layer: str
    unread: str
    """Pattern of tensors to ignore: constants."""
    norms: Mapping[NormPlaces, Names]
    attention: Names
    biases: Mapping[AttentionBiases, Names]
    qk_norms: Mapping[QkNormOver, Names]
    mlp: Names
    experts: Names = MappingProxyType({})
    """Replaces `mlp` in layers with experts."""
    gated_mlp: Names = MappingProxyType({})
    """Replaces `mlp` where feed-forward layers are gated."""
    logit_bias: str = ""
    """The bias of the logits, if models of the family may have one."""
    position_bias: str = ""
    """The bias of relative positions, in each layer or in the first."""
    queries: Mapping[QueryPath, Names] = MappingProxyType({})
    """Queries of latent attention, in addition to `attention`."""
    wide: str = ""
    """Tensors that are always float32, whatever the type of the others."""
    copies: str = ""
    """Pattern of tensors that repeat the embedding in some files."""
    positions: str = ""
    embed_norm: str = ""
    prefix: str = ""
    """Prefix of names that some files omit."""


MERGED = ("common", "defaults", "fields")


def with_bases(tables: Mapping[str, Settings], name: str) -> Settings:
    """Returns the table of a family, or of its tensors, merged with its bases."""
    table = dict(tables[name])
    for base in table.pop("bases", ()):
        whole = with_bases(tables, base)
        merged = {part: whole.get(part, {}) | table.get(part, {}) for part in MERGED}
        table = whole | table | {part: entries for part, entries in merged.items() if entries}
    return table


_TABLES = tomllib.loads(Path(__file__).with_name("tensors.toml").read_text())
TENSORS = {name: Tensors(**with_bases(_TABLES, name)) for name in _TABLES}
"""Tensors of a few families.  The other families use Llama's names."""


class Family(NamedTuple):
    """Describes one family."""

    architecture: str
    """Hugging Face's class."""
    sizes: Mapping[str, str]
    """Settings that every file has, by fields of the Transformer."""
    common: Mapping[str, Any]
    """Settings of most families."""
    activations: Mapping[str, Activation]
    norm_type: type[RmsNorm] | type[LayerNorm]
    tensors: Tensors
    defaults: Mapping[str, Any] = {}
    """Further settings, or defaults other than the common ones."""
    legal: Mapping[str, tuple[Any, ...]] = {}
    """Settings with few legal values."""
    fields: Mapping[str, Any] = {}
    """Fields of the Transformer that no setting determines."""
    bias: AttentionBiases = "all"
    """The biases that `attention_bias` adds."""
    attention: Mapping[str, Any] = {}
    """Fields of its attention that no setting determines."""
    block: Mapping[str, Any] = {}
    """Fields of its blocks that no setting determines."""
    norm: Mapping[str, Any] = {}
    """Fields of its norms that no setting determines."""
    mlp: Mapping[str, Any] = {"gated": True}
    """Fields of its feed-forward layers that no setting determines.  Without `gated`, the name of
    the activation shows whether they are gated, as in "gated-gelu"."""
    mlp_width: int | None = None
    """Ratio of the feed-forward width to the model's width, if no setting gives the width."""
    rope: Mapping[str, Any] = {}
    """Rotary positions of a file that does not describe them."""
    tokens: Mapping[str, int] = {}
    """Ids that an encoder-decoder reads first and writes last, unless a file has others."""
    unties: bool = False
    """Whether only the tensors show if the softmax is the embedding, whatever the settings say."""
    router_type: type[TopK] | type[SigmoidTopK] = TopK
    has_experts: bool = False
    """Whether experts replace the feed-forward layers."""
    equal: Mapping[str, str] = {}
    """Settings that must equal others, if a file has them."""
    aliases: Mapping[str, str] = {}
    """Alternative names of settings."""
    names: Mapping[str, str] = {}
    """This family's names of settings, each with the canonical name."""

    @property
    def has_encoder(self) -> bool:
        return "encoder_layers" in self.sizes

    @property
    def names_positions(self) -> bool:
        """Returns whether the family has the same positions in all models, and not rotary ones."""
        return "positions" in self.fields


def of_toml(value: Any) -> Any:
    """Converts a value of families.toml: "null" to None, and a list of values to a tuple."""
    if isinstance(value, dict):
        return {name: of_toml(part) for name, part in value.items()}
    if isinstance(value, list):
        return tuple(None if part == "null" else part for part in value)
    return None if value == "null" else value


_FILE = of_toml(tomllib.loads(Path(__file__).with_suffix(".toml").read_text()))
SIZES, DEFAULTS, LEGAL, WRAPPERS = (_FILE[x] for x in ("sizes", "common", "legal", "wrappers"))
IGNORED, IMAGES = _FILE["ignored"]["everywhere"], _FILE["ignored"]["images"]
CHECKS: Mapping[str, Sequence[str]] = _FILE["checks"]
FREE = tuple(f"{part}.{name}" for part, names in _FILE["free"].items() for name in names)
RELATIVE, LATENT, SIGMOID = (_FILE[x] for x in ("relative", "latent", "sigmoid"))
POSITIONS: Mapping[str, Positions] = {
    "learned": Learned(), "relative": Relative(), "shared relative": Relative(shared=True),
    "marian": Sinusoidal(inclusive=False), "m2m_100": Sinusoidal(first=2),
    "bart": Learned(by_stack=True, scaled=False, first=2),
}  # fmt: skip
NORMS: Mapping[str, Any] = {"rms": RmsNorm, "layer": LayerNorm}
ROUTERS: Mapping[str, Any] = {"softmax": TopK, "sigmoid": SigmoidTopK}


def family(table: Settings) -> Family:
    """Makes a family from its table."""
    whole = {name: _FILE[name] for name in ("sizes", "common", "activations")} | table
    if "positions" in (fields := whole.get("fields", {})):
        whole["fields"] = fields | {"positions": POSITIONS[fields["positions"]]}
    whole["norm_type"] = NORMS[whole.get("norm_type", "rms")]
    whole["router_type"] = ROUTERS[whole.get("router_type", "softmax")]
    return Family(**whole | {"tensors": TENSORS[whole.get("tensors", "llama")]})


FAMILIES: Mapping[str, Family] = {
    name: family(with_bases(_FILE["families"], name))
    for name, table in _FILE["families"].items()
    if "architecture" in table
}
TEXT_TENSOR = (
    r"(language_model\.model|model\.language_model)\.(?P<rest>.+)"
    r"|(language_model\.)?(?P<head>lm_head\.weight)"
)
"""Tensors of the decoder in a vision-language model, in old and new files."""
