"""Lists the families of models that Hugging Face has and the Transformer here can be.

A family is a table of families.toml: what its config.json may say.  tensors.toml names tensors.
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
"""By the path of a weight here, the name of its tensor and the tensor's axes: each is spelled with
the letters here that it merges."""

QueryPath = Literal["direct", "compressed"]

SOFTMAX = "lm_head.weight"


class Tensors(NamedTuple):
    """Names the tensors of a family; those of layers are relative to `layer`.

    In names, {stack} is encoder or decoder, {layer} and {expert} are numbers, and {last} is how
    many attentions a layer has.
    """

    embedding: str
    final_norm: str
    """Of each stack; empty where none has a norm at its end."""
    layer: str
    unread: str
    """Tensors that nothing reads: constants."""
    norms: Mapping[NormPlaces, Names]
    attention: Names
    biases: Mapping[AttentionBiases, Names]
    qk_norms: Mapping[QkNormOver, Names]
    mlp: Names
    experts: Names = MappingProxyType({})
    """In place of `mlp`, in layers with experts."""
    gated_mlp: Names = MappingProxyType({})
    """In place of `mlp`, where feed-forward layers are gated."""
    logit_bias: str = ""
    """Of the logits, which all models of a family have or none."""
    position_bias: str = ""
    """Of relative positions, in each layer or in the first."""
    queries: Mapping[QueryPath, Names] = MappingProxyType({})
    """Of latent attention, in addition to `attention`."""
    wide: str = ""
    """Tensors that are float32 whatever the type of the others."""
    copies: str = ""
    """Tensors that repeat the embedding in some files."""
    positions: str = ""
    embed_norm: str = ""
    prefix: str = ""
    """What some files leave out."""


MERGED = ("common", "defaults", "fields")


def with_bases(tables: Mapping[str, Settings], name: str) -> Settings:
    """Returns the table of a family, or of its tensors, with what it takes from its bases."""
    table = dict(tables[name])
    for base in table.pop("bases", ()):
        whole = with_bases(tables, base)
        merged = {part: whole.get(part, {}) | table.get(part, {}) for part in MERGED}
        table = whole | table | {part: entries for part, entries in merged.items() if entries}
    return table


_TABLES = tomllib.loads(Path(__file__).with_name("tensors.toml").read_text())
TENSORS = {name: Tensors(**with_bases(_TABLES, name)) for name in _TABLES}
"""Tensors of a few families; those of the others are called as Llama's."""


class Family(NamedTuple):
    """Describes one family."""

    architecture: str
    """The class of Hugging Face's."""
    sizes: Mapping[str, str]
    """Settings that every file has, by their names here."""
    common: Mapping[str, Any]
    """Settings of most families."""
    activations: Mapping[str, Activation]
    norm_type: type[RmsNorm] | type[LayerNorm]
    tensors: Tensors
    defaults: Mapping[str, Any] = {}
    """Settings in addition to those of all families, or other defaults."""
    legal: Mapping[str, tuple[Any, ...]] = {}
    """Settings with few legal values."""
    fields: Mapping[str, Any] = {}
    """Fields of the Transformer that no setting says."""
    bias: AttentionBiases = "all"
    """What `attention_bias` adds."""
    attention: Mapping[str, Any] = {}
    """Fields of its attention that no setting says."""
    block: Mapping[str, Any] = {}
    """Fields of its blocks that no setting says."""
    norm: Mapping[str, Any] = {}
    """Fields of its norms that no setting says."""
    mlp: Mapping[str, Any] = {"gated": True}
    """Fields of its feed-forward layers that no setting says.  Without `gated`, the activation
    says it, as in "gated-gelu"."""
    mlp_width: int | None = None
    """How many times as wide as the model they are, where no setting says."""
    rope: Mapping[str, Any] = {}
    """Rotary positions of a file that says nothing of them."""
    tokens: Mapping[str, int] = {}
    """Ids that an encoder-decoder reads first and writes last, where a file does not say."""
    unties: bool = False
    """Whether files say in any case that the softmax is the embedding; its tensor tells."""
    router_type: type[TopK] | type[SigmoidTopK] = TopK
    has_experts: bool = False
    """Whether experts replace the feed-forward layers."""
    equal: Mapping[str, str] = {}
    """Settings that must equal others, if a file has them."""
    aliases: Mapping[str, str] = {}
    """Other names of settings."""
    names: Mapping[str, str] = {}
    """What this family calls settings, and what the others do."""

    @property
    def has_encoder(self) -> bool:
        return "encoder_layers" in self.sizes

    @property
    def names_positions(self) -> bool:
        """Returns whether the kind of positions is the same in all models, and not rotary."""
        return "positions" in self.fields


def of_toml(value: Any) -> Any:
    """Reads a value of families.toml: "null" is None, and a list of values a tuple."""
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
    """Makes a family of its table."""
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
"""Tensors of the decoder in such a model, as old and new files call them."""
