"""Converts T5 between Hugging Face's settings and tensors and the Transformer here.

Raffel et al. 2020, and version 1.1 with gated activations (Shazeer 2020) and an untied softmax,
which is also mT5 (Xue et al. 2021) and MADLAD-400 (Kudugunta et al. 2023); UMT5 has a bias in each
layer (Chung et al. 2023).
"""

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any, cast

import numpy as np
from flax import traverse_util

from configs.errors import UserError, listed
from configs.write import diff, shown
from models.api import ModelSpec, Params
from models.attention.multi_head import MultiHead
from models.feed_forward.mlp import Activation, Mlp
from models.norms.rms import RmsNorm
from models.positions.relative import Relative
from models.precision import Precision
from models.transformer import Transformer
from trainer.checkpoints.huggingface.families import FAMILIES
from trainer.checkpoints.huggingface.folder import Settings
from trainer.checkpoints.huggingface.parts import (
    ONE_KIND,
    of_kind,
    refuse_changes,
    with_parts_of_first_block,
)
from trainer.checkpoints.huggingface.weights import (
    ConvertedWeight,
    TensorInfo,
    check_tensors,
    common_type,
)

Tensors = dict[str, np.ndarray]

SIZES = {
    "vocab": "vocab_size",
    "d_model": "d_model",
    "d_ff": "d_ff",
    "d_kv": "d_kv",
    "heads": "num_heads",
    "encoder_layers": "num_layers",
    "layers": "num_decoder_layers",
}
RELATIVE = {
    "buckets": "relative_attention_num_buckets",
    "max_distance": "relative_attention_max_distance",
}
# Settings with one legal value.
FIXED: Settings = {"is_encoder_decoder": True, "layer_norm_epsilon": 1e-6}
# Ids of the vocabulary: what a decoder reads first, and what ends a text.
BEGIN, END = "decoder_start_token_id", "eos_token_id"
# What a setting is where the file does not say.
DEFAULTS = {
    "relative_attention_num_buckets": 32,
    "relative_attention_max_distance": 128,
    "feed_forward_proj": "relu",
    "dropout_rate": 0.1,
    "tie_word_embeddings": True,
    BEGIN: 0,
    END: 1,
    **FIXED,
}
KINDS: Mapping[str, Settings] = {
    "t5": {},
    # Hugging Face's library scales no hidden states of an mT5 before the softmax.
    "mt5": {"feed_forward_proj": "gated-gelu", "scale_decoder_outputs": False},
    "umt5": {"feed_forward_proj": "gated-gelu"},
}
"""Other defaults of each model_type."""
# Hugging Face's plain "gelu" is another function: only "gated-gelu" means the one with tanh.
ACTIVATIONS: dict[str, tuple[Activation, bool]] = {
    "relu": ("relu", False),
    "gelu_new": ("gelu", False),
    "silu": ("silu", False),
    "gated-relu": ("relu", True),
    "gated-gelu": ("gelu", True),
    "gated-silu": ("silu", True),
}

SHARED, SOFTMAX = "shared.weight", "lm_head.weight"
# Some files repeat the embedding under these names.
COPIES = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", SOFTMAX)
# The first T5 files have this one, and no implementation reads it.
UNREAD = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
BIAS = "{stack}.block.{layer}.layer.0.SelfAttention.relative_attention_bias.weight"

# Per weight here T5's name for it, and T5's axes: each is spelled with the letters that it merges.
ATTENTION = {
    "wq_DJQK": ("q", "JQK D"),
    "wk_DJK": ("k", "JK D"),
    "wv_DJK": ("v", "JK D"),
    "wo_JQKD": ("o", "D JQK"),
}
MLP = {"wi_DF": ("wi", "F D"), "wo_FD": ("wo", "D F")}
GATED_MLP = {"wg_DF": ("wi_0", "F D"), "wi_DF": ("wi_1", "F D"), "wo_FD": ("wo", "D F")}

# Settings that are free for a T5: they change no weight and no prediction.
FREE = (
    "Transformer.dropout", "Mlp.dropout", "MultiHead.dropout", "MultiHead.combined_qkv",
    "MultiHead.implementation", "MultiHead.chunks", "Transformer.scan", "Transformer.remat",
    "Transformer.remat_saves", "Transformer.loss_chunks", "Precision.compute",
)  # fmt: skip


def weights_of(spec: Transformer) -> Iterator[ConvertedWeight]:
    """Yields all weights of a T5."""
    spec = with_parts_of_first_block(spec)
    relative = of_kind(spec.positions, Relative)
    weight = functools.partial(ConvertedWeight, sizes={**spec.sizes, "R": relative.buckets})
    yield weight("embed_VD", (SHARED,), "V D")
    if not spec.tied:
        yield weight("softmax_VD", (SOFTMAX,), "V D")
    for stack, layers in (("encoder", spec.encoder_layers), ("decoder", spec.layers)):
        yield weight(f"{stack}/norm/scale_D", (f"{stack}.final_layer_norm.weight",), "D")
        biases = tuple(BIAS.format(stack=stack, layer=layer) for layer in range(layers))
        if relative.shared:
            yield weight(f"{stack}/bias/bias_RJQ", biases[:1], "R JQ")
        else:
            yield weight(f"{stack}/layers_N/attention/bias/bias_RJQ", biases, "R JQ")
        for path, name, axes in layer_weights(spec, cross_attention=stack == "decoder"):
            names = tuple(f"{stack}.block.{layer}.{name}.weight" for layer in range(layers))
            yield weight(f"{stack}/layers_N/{path}", names, axes)


def layer_weights(spec: Transformer, *, cross_attention: bool) -> Iterator[tuple[str, str, str]]:
    """Yields the weights of a layer: path here, name in T5 and T5's axes."""
    parts = [("attention", "attention_norm", "SelfAttention", ATTENTION)]
    if cross_attention:
        parts.append(("source_attention", "source_norm", "EncDecAttention", ATTENTION))
    is_gated = of_kind(spec.feed_forward, Mlp).gated
    parts.append(("mlp", "mlp_norm", "DenseReluDense", GATED_MLP if is_gated else MLP))
    for place, (part, norm, t5_part, weights) in enumerate(parts):
        yield f"{norm}/scale_D", f"layer.{place}.layer_norm", "D"
        for leaf, (name, axes) in weights.items():
            yield f"{part}/{leaf}", f"layer.{place}.{t5_part}.{name}", axes


# From T5


def check_settings(settings: Settings, source: object) -> None:
    """Refuses the settings of another model, and those that the Transformer here lacks."""
    kind = settings.get("model_type")
    if kind not in [*KINDS]:  # it may have no hash
        is_decoder = isinstance(kind, str) and kind in FAMILIES
        hint = f"  `meshloom import hf` imports {kind}." if is_decoder else ""
        legal = ", ".join(map(repr, KINDS))
        raise UserError(f"{source}: model_type = {kind!r}: not a T5.  Legal: {legal}.{hint}")
    problems = list(_wrong_settings(completed(settings)))
    if problems:
        raise UserError(listed(str(source), [f"{source}: {problem}" for problem in problems]))


def completed(settings: Settings) -> Settings:
    """Returns the settings with the defaults of their model_type."""
    kind = KINDS[settings["model_type"]]
    return {**DEFAULTS, **kind, **settings}


def _wrong_settings(settings: Settings) -> Iterator[str]:
    for name in (*SIZES.values(), *RELATIVE.values()):
        size = settings.get(name)
        if name == "num_decoder_layers" and size is None:
            continue
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            yield f"{name} = {size!r}: legal: an integer of at least 1."
    for name in (BEGIN, END):
        token = settings[name]
        if not isinstance(token, int) or isinstance(token, bool) or token < 0:
            yield f"{name} = {token!r}: legal: an id of the vocabulary."
    for name, fixed in FIXED.items():
        if settings[name] != fixed:
            yield f"{name} = {settings[name]!r}: legal: {fixed!r}."
    if settings["feed_forward_proj"] not in list(ACTIVATIONS):  # it may have no hash
        value, legal = settings["feed_forward_proj"], ", ".join(map(repr, ACTIVATIONS))
        yield f"feed_forward_proj = {value!r}: legal: {legal}."
    rate = settings["dropout_rate"]
    if not isinstance(rate, int | float) or not 0 <= rate < 1:
        yield f"dropout_rate = {rate!r}: legal: a number of at least 0 and below 1."


def read_tensors(settings: Settings, tensors: Tensors) -> Tensors:
    """Drops the tensors that repeat the embedding and those that nothing reads."""
    tied = completed(settings)["tie_word_embeddings"]

    def is_copy(name: str) -> bool:
        if name not in COPIES or SHARED not in tensors or (name == SOFTMAX and not tied):
            return False
        return np.array_equal(tensors[name], tensors[SHARED])

    return {name: t for name, t in tensors.items() if name != UNREAD and not is_copy(name)}


def spec_of(settings: Settings, tensors: Tensors) -> Transformer:
    """Makes the spec of a T5.  Its settings are checked, its tensors need not be.

    Whether the softmax is tied shows in the tensors: newer files say in any case that it is.
    """
    full = completed(settings)
    sizes = {name: full.get(t5_name) for name, t5_name in SIZES.items()}
    sizes["layers"] = sizes["layers"] or sizes["encoder_layers"]
    relative: dict[str, Any] = {name: full[t5_name] for name, t5_name in RELATIVE.items()}
    activation, gated = ACTIVATIONS[full["feed_forward_proj"]]
    scaled = full.get("scale_decoder_outputs", full["tie_word_embeddings"])
    rate = float(full["dropout_rate"])
    return Transformer(
        **cast(dict[str, Any], sizes),
        attention=MultiHead(query_scale=1.0, dropout=rate),
        positions=Relative(**relative, shared=full["model_type"] != "umt5"),
        feed_forward=Mlp(activation=activation, gated=gated),
        tied=SOFTMAX not in tensors and bool(full["tie_word_embeddings"]),
        embed_scale=1.0,
        logit_scale=full["d_model"] ** -0.5 if scaled else 1.0,
        dropout=rate,
        precision=Precision(store=common_type(tensor.dtype.name for tensor in tensors.values())),
    )


def check_weights(spec: Transformer, tensors: Tensors, source: object) -> None:
    """Refuses tensors that are missing, unexpected, of another shape or no floats."""
    described = {name: TensorInfo(x.shape, x.dtype.name) for name, x in tensors.items()}
    check_tensors(weights_of(spec), described, source, "T5")


def params_of(spec: Transformer, tensors: Tensors) -> Params:
    """Converts T5's tensors to weights."""
    flat = {
        weight.path: weight.from_tensors_by_name(tensors).astype(spec.precision.store)
        for weight in weights_of(spec)
    }
    return cast(Params, traverse_util.unflatten_dict(flat, sep="/"))


def check_same(spec: Transformer, chosen: ModelSpec) -> None:
    """Refuses settings under which the weights of a T5 would be another model."""
    changed = [row for row in diff(spec, chosen) if row[0] not in FREE]
    refuse_changes(changed, "T5", "in T5", FREE)


# To T5


def settings_of(model: ModelSpec) -> Settings:
    """Makes config.json of a model; refuses one that no T5 is equal to.

    An mT5 becomes the T5 of version 1.1 that it is.
    """
    if not isinstance(model, Transformer):
        raise UserError(f"Run.model = @{type(model).__name__}(): only a Transformer can be a T5.")
    model = with_parts_of_first_block(model)
    legal: dict[str, tuple[Any, ...]] = {
        "Transformer.kv_heads": (None, model.heads),
        "Transformer.logit_scale": (model.d_model**-0.5, 1.0),
        "Mlp.dropout": (None, model.dropout),
    }
    problems = [
        f"{name} = {shown(value)}, legal: {' or '.join(map(shown, legal.get(name, (same,))))}."
        for name, value, same in diff(model, _nearest(model))
        if value not in legal.get(name, ())
    ]
    if not model.encoder_layers:
        problems.append("Transformer.encoder_layers = 0, legal: at least 1.")
    if problems:
        title = "T5 cannot express this model."
        raise UserError("\n  ".join([title, *problems]))
    forms = {form: name for name, form in ACTIVATIONS.items()}
    relative, mlp = of_kind(model.positions, Relative), of_kind(model.feed_forward, Mlp)
    kind, library_class = ("t5", "T5") if relative.shared else ("umt5", "UMT5")
    return {
        "model_type": kind,
        "architectures": [f"{library_class}ForConditionalGeneration"],
        **FIXED,
        **{t5_name: getattr(model, name) for name, t5_name in SIZES.items()},
        **{t5_name: getattr(relative, name) for name, t5_name in RELATIVE.items()},
        "feed_forward_proj": forms[mlp.activation, mlp.gated],
        "dropout_rate": model.dropout,
        "tie_word_embeddings": model.tied,
        "scale_decoder_outputs": model.logit_scale != 1,
        "torch_dtype": model.precision.store,
    }


def _nearest(model: Transformer) -> Transformer:
    """Returns a T5 that has of a model what a T5 can have."""
    attention = of_kind(model.attention, MultiHead)
    relative, mlp = of_kind(model.positions, Relative), of_kind(model.feed_forward, Mlp)
    return dataclasses.replace(
        model,
        source_vocab=None,
        kv_heads=None,
        embed_scale=1.0,
        logit_scale=1.0,
        attention=MultiHead(
            query_scale=1.0,
            dropout=model.dropout,
            implementation=attention.implementation,
            chunks=attention.chunks,
            combined_qkv=attention.combined_qkv,
        ),
        positions=relative,
        feed_forward=dataclasses.replace(mlp, dropout=None),
        norm=RmsNorm(),
        pattern=ONE_KIND,
        encoder_pattern=None,
    )
