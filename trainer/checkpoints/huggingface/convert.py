"""Converts models between Hugging Face's settings and tensors and Meshloom's Transformer."""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from configs.errors import UserError, brief, did_you_mean, listed
from configs.write import diff, shown
from models.api import ModelSpec
from models.attention.latent import Latent
from models.attention.multi_head import MultiHead
from models.feed_forward.mlp import Mlp
from models.feed_forward.moe.layer import Moe
from models.feed_forward.moe.routing import SigmoidTopK
from models.norms import LayerNorm, RmsNorm
from models.parts import Attention, Block, FeedForward, Positions
from models.positions.absolute import Learned, NoPositions
from models.positions.relative import Relative
from models.positions.rotary import Rotary
from models.precision import FloatType, Precision
from models.transformer import Transformer
from trainer.checkpoints.huggingface import families, rope
from trainer.checkpoints.huggingface.families import CHECKS, Family, Names, Settings, Tensors
from trainer.checkpoints.huggingface.parts import of_kind, with_shortest_pattern
from trainer.checkpoints.huggingface.weights import ConvertedWeight

DECODER = "decoder"
MAX_LAYERS = 10_000
SHARED, BIAS = "mlp/shared/", "mlp/bias_E"
"""Weights that only some MoE layers have."""
GATED = "gated-"
"""Prefix of the names of gated activations, in families that also have ungated ones."""
# Scales that an export folds into weights.  Norms that multiply by 1 + scale prevent that.
SCALES = ("Transformer.embed_scale", "MultiHead.query_scale", "Transformer.logit_scale")
IDS = ("decoder_start_token_id", "eos_token_id")
"""Tokens that an encoder-decoder reads first and writes last."""


# From Hugging Face


def text_part(settings: Settings) -> Settings:
    """Returns the decoder's settings, also from the settings of a vision-language model."""
    kind = families.WRAPPERS.get(str(settings.get("model_type")))
    if kind is None or not isinstance(settings.get("text_config"), dict):
        return settings
    shared = {name: value for name, value in settings.items() if name not in families.IMAGES}
    named = {"model_type": kind, "architectures": [families.FAMILIES[kind].architecture]}
    return {**shared, **settings["text_config"], **named}


def text_name(name: str) -> str | None:
    """Returns the decoder's name of a vision-language model's tensor, None for an image tensor."""
    match = re.fullmatch(families.TEXT_TENSOR, name)
    return match and (match["head"] or f"model.{match['rest']}")


def family_of(settings: Settings, source: object) -> Family:
    """Returns the family that the settings name."""
    kind = settings.get("model_type")
    if not isinstance(kind, str) or kind not in families.FAMILIES:
        hint = "  It has no text_config." if kind in [*families.WRAPPERS] else ""
        raise UserError(
            f"{source}: model_type = {kind!r}: not a model that Meshloom imports.  Legal: "
            f"{', '.join(map(repr, [*families.FAMILIES, *families.WRAPPERS]))}.{hint}"
        )
    return families.FAMILIES[kind]


def completed(settings: Settings, family: Family) -> Settings:
    """Returns the settings with the family's defaults, all under their canonical names."""
    full = {**family.common, **family.defaults, **settings}
    names = {**family.aliases, **family.names}
    full |= {first: full.pop(name) for name, first in names.items() if name in full}
    if full.get("num_hidden_layers") is None and family.has_encoder:
        full["num_hidden_layers"] = full.get("encoder_layers")
    if family.rope and not (full["rope_parameters"] or full["rope_scaling"]):
        full["rope_parameters"] = dict(family.rope)
    width = full.get("hidden_size")
    if full.get("intermediate_size") is None and family.mlp_width and isinstance(width, int):
        full["intermediate_size"] = family.mlp_width * width
    return full


def legal_values(family: Family) -> Mapping[str, tuple[Any, ...]]:
    """Returns the settings for which a family allows only a few values, with these values."""
    open_names = family.defaults.keys() - family.legal.keys()
    return {n: v for n, v in {**families.LEGAL, **family.legal}.items() if n not in open_names}


def check_settings(settings: Settings, source: object) -> None:
    """Rejects settings that `Transformer` lacks, and unknown settings."""
    family = family_of(settings, source)
    full = completed(settings, family)
    wrong = [*_wrong_settings(full, family)] or [*_wrong_windows(full)]
    if not (wrong or family.names_positions):
        wrong = [*rope.problems(full)]
    names = {first: name for name, first in family.names.items()}
    wrong = [re.sub(r"^\w+", lambda first: names.get(first[0], first[0]), row) for row in wrong]
    known = {*family.common, *family.defaults, *legal_values(family), *families.IGNORED}
    known |= {*family.sizes.values(), *family.equal}
    unknown = [
        f"{name} = {full[name]!r}: Meshloom does not know whether it changes the model."
        f"{did_you_mean(name, known)}  Remove it if it does not."
        for name in sorted(full.keys() - known)
    ]
    if problems := [*wrong, *unknown]:
        raise UserError(listed(str(source), [f"{source}: {problem}" for problem in problems]))


def _wrong_settings(full: Settings, family: Family) -> Iterator[str]:
    few, nullable = legal_values(family), CHECKS["nullable"]
    counts = [name for name in CHECKS["counts"] if name in full and name not in few]
    for name in dict.fromkeys((*family.sizes.values(), *counts)):
        size, may_be_null = full.get(name), name in {*nullable} - {*family.sizes.values()}
        most = MAX_LAYERS if name.endswith("layers") else 2**31 - 1
        is_count = isinstance(size, int) and not isinstance(size, bool) and 1 <= size <= most
        if not is_count and not (size is None and may_be_null):
            legal = f"an integer from 1 to {most:,}" + " or null" * may_be_null
            yield f"{name} = {size!r}: legal: {legal}."
    for name in (*CHECKS["numbers"], *CHECKS["positive"]):
        number, least = full.get(name, 1.0), math.ulp(0.0) if name in CHECKS["positive"] else 0
        is_number = isinstance(number, int | float) and not isinstance(number, bool)
        is_unset = name in few or (number is None and name in nullable)
        if not is_unset and not (is_number and least <= number < math.inf):
            legal = "above 0" + " or null" * (name in nullable) if least else "of at least 0"
            yield f"{name} = {number!r}: legal: a number {legal}."
    for name in CHECKS["rates"]:
        rate = full.get(name, 0)
        if not isinstance(rate, int | float) or not 0 <= rate < 1:
            yield f"{name} = {rate!r}: legal: a number of at least 0 and below 1."
    for name in (*CHECKS["naturals"], *(IDS if family.has_encoder else ())):
        number = full.get(name, 0)
        if not isinstance(number, int) or isinstance(number, bool) or number < 0:
            yield f"{name} = {number!r}: legal: an integer of at least 0."
    for name in CHECKS["flags"]:
        if not isinstance(full.get(name, False), bool):
            yield f"{name} = {full[name]!r}: legal: true or false."
    there = {first: name for name, first in family.names.items()}
    for name, other in family.equal.items():
        value, same = full.get(name), full.get(other)
        if value not in (None, same):
            yield f"{name} = {value!r}: legal: {same!r}, as {there.get(other, other)}."
    width, heads = (full.get(name) for name in ("hidden_size", "num_attention_heads"))
    is_derived = full.get("head_dim") is None
    if is_derived and isinstance(width, int) and isinstance(heads, int) and width < heads:
        yield f"num_attention_heads = {heads}: legal: at most hidden_size, which is {width}."
    for name, values in few.items():
        if name in full and full[name] not in values:
            yield f"{name} = {full[name]!r}: legal: {' or '.join(map(repr, values))}."
    if full["hidden_act"] not in list(family.activations):  # the value may be unhashable
        legal = ", ".join(map(repr, family.activations))
        yield f"hidden_act = {full['hidden_act']!r}: legal: {legal}."


def _wrong_windows(full: Settings) -> Iterator[str]:
    for name, values in {"layer_types": rope.KINDS, "no_rope_layers": (0, 1)}.items():
        each = full.get(name)
        is_one_each = isinstance(each, list) and len(each) == full.get("num_hidden_layers")
        if each is not None and not (is_one_each and all(one in values for one in each)):
            legal = " or ".join(map(repr, values))
            yield f"{name} = {brief(repr(each))}: legal: {legal} for each layer, or null."
    others = full.get("mlp_only_layers")
    if others is not None and not (isinstance(others, list) and {*map(type, others)} <= {int}):
        yield f"mlp_only_layers = {brief(repr(others))}: legal: a list of layers, or null."


def kinds_of_layers(full: Settings) -> Sequence[str]:
    """Returns the kind of each layer."""
    if full.get("layer_types"):
        return full["layer_types"]
    first, period = full.get("max_window_layers") or 0, full.get("sliding_window_pattern")
    layers = range(full["num_hidden_layers"])
    slides = [bool((i + 1) % period) if period else i >= first for i in layers]
    if "no_rope_layers" in full:  # layers have either a window or rotary positions
        slides = [not one for one in layers_that_rotate(full)]
    return [rope.KINDS[one] for one in slides]


def layers_that_rotate(full: Settings) -> Sequence[bool]:
    """Returns whether each layer has rotary positions."""
    if full.get("no_rope_layers") is not None:
        return [bool(one) for one in full["no_rope_layers"]]
    interval = full.get("no_rope_layer_interval")
    return [not interval or (i + 1) % interval != 0 for i in range(full["num_hidden_layers"])]


def latent_of(full: Settings) -> Latent:
    """Makes latent attention, whose norms keep the default epsilon."""
    fields, norm = {ours: full[there] for ours, there in families.LATENT.items()}, RmsNorm()
    scale = rope.query_scale(rope.parameters(full))
    return Latent(
        **fields,
        norm=None if full["rms_norm_eps"] == norm.epsilon else norm,
        dropout=float(full["attention_dropout"]),
        query_scale=None if scale == 1 else scale * (full["head_dim"] + fields["rotated"]) ** -0.5,
    )


def block_of(full: Settings, family: Family, kind: str, *, rotates: bool) -> Block:
    """Makes the block of a layer of this kind."""
    slides = kind == rope.SLIDING and full.get("use_sliding_window", True)
    query = full.get("query_pre_attn_scalar", width_of_heads(full)) ** -0.5
    query = full.get("attention_multiplier", query)
    attention: dict[str, Any] = {
        "biases": family.bias if full.get("attention_bias") else "none",
        "qk_norm": full.get("use_qk_norm", False),
        "dropout": float(full["attention_dropout" if "attention_dropout" in full else "dropout"]),
        "window": full.get("sliding_window") if slides else None,
        "logit_cap": full.get("attn_logit_softcapping"),
        "query_scale": None if query == width_of_heads(full) ** -0.5 else query,
        **family.attention,
    }
    positions: Positions | None = None
    if not family.names_positions:
        positions = rope.rotary_of(rope.of_layers(full, kind)) if rotates else NoPositions()
    is_latent, scale = "kv_lora_rank" in full, float(full.get("residual_multiplier", 1.0))
    part: Attention = latent_of(full) if is_latent else MultiHead(**attention)
    return Block(attention=part, positions=positions, residual_scale=scale, **family.block)


def width_of_heads(full: Settings) -> int:
    return full.get("head_dim") or full["hidden_size"] // full["num_attention_heads"]


def spec_of(settings: Settings, store: FloatType, source: object) -> Transformer:
    """Makes the spec of a model from settings that `check_settings` accepts."""
    family = family_of(settings, source)
    full = completed(settings, family)
    fields: dict[str, Any] = {
        **{ours: full[there] for ours, there in family.sizes.items()},
        "positions": NoPositions(),
        "kv_heads": full.get("num_key_value_heads") or full["num_attention_heads"],
        "d_kv": width_of_heads(full),
        "tied": full["tie_word_embeddings"],
        "embed_scale": float(full.get("embedding_multiplier", 1.0)),
        "logit_scale": 1 / full.get("logits_scaling", 1.0),
        "logit_cap": full.get("final_logit_softcapping"),
        "dropout": float(full.get("dropout", 0.0)),
        **family.fields,
    }
    if full.get("scale_embedding"):
        fields["embed_scale"] = None
    scales = full.get("scale_decoder_outputs", False)
    if full["tie_word_embeddings"] if scales is None else scales:
        fields["logit_scale"] = full["hidden_size"] ** -0.5
    norm: dict[str, Any] = {"epsilon": full.get("rms_norm_eps", LayerNorm().epsilon), **family.norm}
    try:
        if isinstance(positions := fields["positions"], Relative):
            given = {ours: full[there] for ours, there in families.RELATIVE.items()}
            fields["positions"] = dataclasses.replace(positions, **given)
        activation = family.activations[full["hidden_act"]]
        mlp_fields: dict[str, Any] = {"dropout": full.get("activation_dropout")}
        mlp_fields["biases"] = full.get("mlp_bias", False)
        mlp_fields |= {"gated": full["hidden_act"].startswith(GATED), **family.mlp}
        mlp = Mlp(activation=activation, **mlp_fields)
        layers = zip(kinds_of_layers(full), layers_that_rotate(full), strict=True)
        blocks = tuple(block_of(full, family, kind, rotates=one) for kind, one in layers)
        feed_forward: FeedForward = mlp
        if family.has_experts:
            feed_forward, dense = experts_of(full, family, mlp), dense_layers(full)
            blocks = tuple(
                dataclasses.replace(block, feed_forward=mlp) if i in dense else block
                for i, block in enumerate(blocks)
            )
        spec = Transformer(
            **fields,
            pattern=blocks[:1] if family.has_encoder else blocks,
            feed_forward=feed_forward,
            norm=family.norm_type(**norm),
            precision=Precision(store=store),
        )
        return with_shortest_pattern(spec)
    except UserError as error:
        raise UserError(f"{source}: {error}") from None


def with_tensors(spec: Transformer, kind: str, *, tied: bool, logit_bias: bool) -> Transformer:
    """Returns the spec with what only the tensors show: whether it is tied and has a logit bias."""
    family = families.FAMILIES[kind]
    tied = tied if family.unties else spec.tied
    logit_bias = logit_bias if family.tensors.logit_bias else spec.logit_bias
    return dataclasses.replace(spec, tied=tied, logit_bias=logit_bias)


def dense_layers(full: Settings) -> set[int]:
    """Returns the layers without experts in an MoE model."""
    first, step = full.get("first_k_dense_replace", 0), full.get("decoder_sparse_step", 1)
    others = {i for i in range(full["num_hidden_layers"]) if i < first or (i + 1) % step}
    return others | {*(full.get("mlp_only_layers") or ())}


def experts_of(full: Settings, family: Family, expert: Mlp) -> Moe:
    """Makes the MoE settings.  The dispatch drops no tokens."""
    router: dict[str, Any] = {
        "k": full["num_experts_per_tok"],
        "normalises": full.get("norm_topk_prob", True),
        "aux_loss": full["router_aux_loss_coef"],
    }
    if family.router_type is SigmoidTopK:
        router |= {ours: full[there] or 1 for ours, there in families.SIGMOID.items()}
    width, shared = full.get("moe_intermediate_size"), full.get("n_shared_experts")
    return Moe(
        experts=full["num_experts"] if "num_experts" in full else full["num_local_experts"],
        d_ff=width,
        expert=expert,
        router=family.router_type(**router),
        dispatch="dropless",
        shared_d_ff=shared and width and shared * width,
    )


def weights_of(spec: Transformer, family: Family) -> Iterator[ConvertedWeight]:
    """Yields all weights of a model."""
    tensors, attention = family.tensors, spec.blocks[0].attention
    sizes = {**spec.sizes, "R": of_kind(spec.positions, Relative).buckets}
    if isinstance(attention, Latent):
        sizes |= {"R": attention.latent, "P": attention.rotated, "O": attention.query_latent or 0}
    weight = functools.partial(ConvertedWeight, sizes=sizes)
    yield weight("embed_VD", (tensors.embedding,), "V D")
    stacks = {"": DECODER, "source_": "encoder"} if spec.has_encoder else {"": DECODER}
    for prefix, stack in stacks.items():
        if isinstance(spec.positions, Learned):  # each stack has a table
            rows = {**sizes, "L": sizes["L"] + spec.positions.first}
            name = tensors.positions.format(stack=stack)
            yield weight(f"{prefix}positions_LD", (name,), "L D", sizes=rows)
        if spec.embed_norm:
            norm = {"scale_D": (tensors.embed_norm.format(stack=stack), "D")}
            for path, (name, axes) in biased(spec, norm).items():
                yield weight(f"{prefix}embed_norm/{path}", (name,), axes)
    if not spec.tied:
        yield weight("softmax_VD", (families.SOFTMAX,), "V D")
    if spec.logit_bias:
        yield weight("logit_bias_V", (tensors.logit_bias,), "1 V")
    for stack in reversed(stacks.values()):
        place = functools.partial(tensors.layer.format, stack=stack)
        final = {"scale_D": (tensors.final_norm, "D")} if tensors.final_norm else {}
        for path, (name, axes) in biased(spec, final).items():
            yield weight(f"{stack}/norm/{path}", (name.format(stack=stack),), axes)
        if spec.positions.shares_bias:
            first = place(layer=0, name=tensors.position_bias)
            yield weight(f"{stack}/bias/bias_RJQ", (first,), "R JQ")
        for block in spec.placed_blocks(stack):
            mlp = block.parts.feed_forward
            for path, (name, axes) in names_of_layers(spec, tensors, stack, mlp).items():
                experts, sizes_here = 1, sizes
                if isinstance(mlp, Moe):
                    experts = mlp.experts if "{expert}" in name else 1
                    width = mlp.shared_d_ff if path.startswith(SHARED) else mlp.width(spec)
                    sizes_here = {**sizes, "E": mlp.experts, "F": width or 0}
                every = tuple(
                    place(layer=layer, name=name.format(expert=expert, last=1 + (stack == DECODER)))
                    for layer in block.layers
                    for expert in range(experts)
                )
                yield weight(f"{stack}/{block.path}/{path}", every, axes, sizes=sizes_here)


def names_of_layers(spec: Transformer, tensors: Tensors, stack: str, mlp: FeedForward) -> Names:
    """Returns the tensors' names and axes for a layer with this feed-forward part, by path."""
    attention = spec.blocks[0].attention
    heads = of_kind(attention, MultiHead)
    names = {
        **biased(spec, tensors.norms[spec.blocks[0].norm_places]),
        **tensors.attention,
        **tensors.biases[heads.biases],
        **(tensors.qk_norms[heads.qk_norm_over] if heads.qk_norm else {}),
        **feed_forward_names(tensors, mlp),
    }
    if isinstance(attention, Latent):
        names |= tensors.queries["direct" if attention.query_latent is None else "compressed"]
    if isinstance(spec.positions, Relative) and not spec.positions.shared:
        names["attention/bias/bias_RJQ"] = (tensors.position_bias, "R JQ")
    is_there = stack == DECODER and spec.has_encoder
    return {path: row for path, row in names.items() if is_there or not path.startswith("source")}


def feed_forward_names(tensors: Tensors, mlp: FeedForward) -> Names:
    """Returns the tensors' names and axes for a feed-forward or MoE layer, by path."""
    if not isinstance(mlp, Moe):
        mlp = of_kind(mlp, Mlp)
        names = (mlp.gated and tensors.gated_mlp) or tensors.mlp
        return {p: row for p, row in names.items() if mlp.biases or not p.startswith("mlp/b")}
    is_there = {SHARED: mlp.shared_d_ff is not None, BIAS: mlp.router.has_bias}
    absent = tuple(path for path, is_present in is_there.items() if not is_present)
    return {p: row for p, row in tensors.experts.items() if not p.startswith(absent)}


def biased(spec: Transformer, norms: Names) -> Names:
    """Returns the names of norms, and of their biases if the model uses `LayerNorm`."""
    if not isinstance(spec.norm, LayerNorm):
        return norms
    return dict(norms) | {
        path.replace("scale", "bias"): (name.replace("weight", "bias"), axes)
        for path, (name, axes) in norms.items()
    }


def is_unread(name: str, settings: Settings) -> bool:
    """Returns whether a tensor is ignored, as constants are."""
    pattern = families.FAMILIES[settings["model_type"]].tensors.unread
    layers = str(settings.get("num_hidden_layers"))
    return re.fullmatch(pattern.replace("{layers}", layers), name) is not None


def is_copy(name: str, settings: Settings) -> bool:
    """Returns whether a tensor must equal the embedding, as the softmax of a tied model does."""
    family = families.FAMILIES[settings["model_type"]]
    is_tied = completed(settings, family)["tie_word_embeddings"]
    copies = re.fullmatch(family.tensors.copies, name)
    return (name == families.SOFTMAX and is_tied) or copies is not None


def full_name(name: str, family: Family) -> str:
    """Returns the name of a tensor with the prefix that some files of a family omit."""
    tensors = family.tensors
    has_all = name in (families.SOFTMAX, tensors.logit_bias) or name.startswith(tensors.prefix)
    return name if has_all else tensors.prefix + name


def check_same(spec: Transformer, chosen: ModelSpec) -> None:
    """Rejects settings that would make a different model of the weights."""
    rows = "".join(
        f"\n  {name}: {shown(old)} in the files, {shown(new)} set"
        for name, old, new in changes(spec, chosen)
    )
    if rows:
        raise UserError(
            f"these settings are not the imported model's:{rows}\n"
            f"  Unset them.  Free to choose: {', '.join(families.FREE)}."
        )


def changes(a: ModelSpec, b: ModelSpec) -> list[tuple[str, Any, Any]]:
    """Returns the settings that make two models' predictions differ, with both values."""
    is_learned = isinstance(a, Transformer) and isinstance(a.positions, Learned)
    # The first is the length, which a table of learned positions fixes.
    free = families.FREE[1:] if is_learned else families.FREE
    return [row for row in diff(a, b) if row[0] not in free]


# To Hugging Face


def to_names(part: object, names: Mapping[str, str]) -> Settings:
    """Returns fields of a part under Hugging Face's names."""
    return {there: getattr(part, ours) for ours, there in names.items()}


def settings_of(spec: Transformer, kind: str) -> Settings:
    """Makes config.json of a model for a family, even if the family cannot express the model."""
    family, spec = families.FAMILIES[kind], with_shortest_pattern(spec)
    latent = spec.attention if isinstance(spec.attention, Latent) else None
    attention = latent or of_kind(spec.attention, MultiHead)
    norm = spec.norm if isinstance(spec.norm, LayerNorm) else of_kind(spec.norm, RmsNorm)
    layers = spec.blocks_by_layer
    kinds = [rope.KINDS[layer.attention.window is not None] for layer in layers]
    rotates = [isinstance(layer.positions, Rotary) for layer in layers]
    pairs = zip(kinds, layers, strict=True)
    rotary = {kind: x.positions for kind, x in pairs if isinstance(x.positions, Rotary)}
    window = next((layer.attention.window for layer in layers if layer.attention.window), None)
    dense = [i for i, layer in enumerate(layers) if not isinstance(layer.feed_forward, Moe)]
    parts = (layer.feed_forward for layer in layers)
    moe = next((part for part in parts if isinstance(part, Moe)), None)
    mlp = of_kind(spec.feed_forward, Mlp) if moe is None else moe.expert
    is_named = mlp.gated and "gated" not in family.mlp
    same = [name for name, one in family.activations.items() if one == mlp.activation]
    names = same or [*family.activations]
    activation = min(names, key=lambda name: name.startswith(GATED) != is_named)
    local, query = of_kind(rotary.get(rope.SLIDING), Rotary), attention.query_scale
    whole = rotary.get(rope.FULL) or local
    every: Settings = {
        **to_names(spec, family.sizes),
        **to_names(of_kind(spec.positions, Relative), families.RELATIVE),
        **rope.settings_of(whole),
        "rope_local_base_freq": local.theta,
        "num_key_value_heads": spec.kv_heads or spec.heads,
        "head_dim": spec.d_kv,
        "hidden_act": activation,
        "hidden_activation": activation,
        "rms_norm_eps": norm.epsilon,
        "attention_bias": of_kind(attention, MultiHead).biases == family.bias,
        "use_qk_norm": of_kind(attention, MultiHead).qk_norm,
        "mlp_bias": mlp.biases,
        "partial_rotary_factor": whole.fraction,
        "attention_dropout": attention.dropout,
        "dropout": spec.dropout,
        "is_encoder_decoder": spec.has_encoder,
        "tie_word_embeddings": spec.tied,
        "sliding_window": window,
        "use_sliding_window": window is not None,
        "max_window_layers": 0 if window else spec.layers,
        "layer_types": kinds,
        "no_rope_layers": [int(one) for one in rotates],
        "query_pre_attn_scalar": spec.d_kv if query is None else round(query**-2),
        "attn_logit_softcapping": attention.logit_cap,
        "final_logit_softcapping": spec.logit_cap,
        "embedding_multiplier": spec.embed_scale or spec.d_model**0.5,
        "attention_multiplier": query or spec.d_kv**-0.5,
        "residual_multiplier": spec.pattern[0].residual_scale,
        "logits_scaling": 1 / spec.logit_scale,
        "scale_decoder_outputs": spec.logit_scale != 1,
        "scale_embedding": spec.embed_scale is None,
        "activation_dropout": mlp.dropout_rate(spec),
    }
    if family.rope and not every["rope_scaling"]:  # the file must contain them
        every["rope_parameters"] = {"rope_type": rope.PLAIN, "rope_theta": every["rope_theta"]}
    every |= {name: every[other] for name, other in family.equal.items()}
    if latent is not None:
        every |= to_names(latent, families.LATENT)
        if query is not None and every["rope_scaling"]:
            scale = query * (spec.d_kv + latent.rotated) ** 0.5
            every["rope_scaling"] |= rope.of_query_scale(scale, every["rope_scaling"])
    if moe is not None:
        width = moe.width(spec)
        every |= {
            "first_k_dense_replace": len(dense),
            "mlp_only_layers": dense,
            "decoder_sparse_step": 1,
            "n_shared_experts": (moe.shared_d_ff or 0) // width,
            **to_names(of_kind(moe.router, SigmoidTopK), families.SIGMOID),
            "num_local_experts": moe.experts,
            "num_experts": moe.experts,
            "num_experts_per_tok": moe.router.choices,
            "moe_intermediate_size": width,
            "norm_topk_prob": getattr(moe.router, "normalises", False),
            "router_aux_loss_coef": moe.router.aux_loss,
        }
    known = {*family.sizes.values(), *family.common, *family.defaults, *family.equal}
    known |= {"is_encoder_decoder"} if family.has_encoder else set()
    there = {first: name for name, first in family.names.items()}
    return {
        "architectures": [family.architecture],
        "model_type": kind,
        "torch_dtype": spec.precision.store,
        **{there.get(name, name): value for name, value in every.items() if name in known},
    }


def factors(model: Transformer, settings: Settings) -> dict[str, float]:
    """Returns by path the factors of weights that make the exported model predict the same:
    it has other scales for embeddings, queries and hidden states."""
    exported = spec_of(settings, model.precision.store, "config.json")
    here, there = scales(model), scales(exported)
    embed, query, logits = (mine / other for mine, other in zip(here, there, strict=True))
    has_qk_norm = of_kind(model.blocks[0].attention, MultiHead).qk_norm
    norms = ("q_norm/scale_K", "q_norm/scale_JQK")
    queries = norms if has_qk_norm else ("wq_DJQK", "bq_JQK")
    last = logits / (embed if model.tied else 1.0)
    by_name = {"embed_VD": embed, **dict.fromkeys(queries, query)}
    if of_kind(model.positions, Learned).scaled:
        by_name["positions_LD"] = embed
    by_name |= {f"{DECODER}/norm/scale_D": last, f"{DECODER}/norm/bias_D": last}

    def factor(path: str) -> float:
        return next((by_name[name] for name in by_name if f"/{path}".endswith(f"/{name}")), 1.0)

    paths = [weight.path for weight in weights_of(model, families.FAMILIES[settings["model_type"]])]
    return {path: factor(path) for path in paths if factor(path) != 1.0}


def scales(spec: Transformer) -> tuple[float, float, float]:
    """Returns the scales of embeddings, of queries and of hidden states before the softmax."""
    attention = of_kind(spec.blocks[0].attention, MultiHead)
    embed, query = spec.embed_scale or spec.d_model**0.5, attention.query_scale or spec.d_kv**-0.5
    return embed, query, spec.logit_scale


def exported_settings(model: ModelSpec, original: Settings | None) -> Settings:
    """Makes config.json of a model: the imported one if the model is unchanged, else a new one."""
    if not isinstance(model, Transformer):
        raise UserError(f"Run.model = @{type(model).__name__}(): only a Transformer is exported.")
    settings, kind, same = dict(original or {}), None, None
    if original is not None:
        kind, same = original["model_type"], spec_of(original, model.precision.store, "config.json")
        same = with_tensors(same, kind, tied=model.tied, logit_bias=model.logit_bias)
    if same is None or changes(same, model):
        kind, problems = closest_family(model, kind)
        if problems:
            rows = "".join(f"\n  {row}" for row in problems)
            raise UserError(f"Hugging Face's {kind} cannot express this model:{rows}")
        settings = {name: settings[name] for name in families.IGNORED if name in settings}
        settings |= settings_of(model, kind)
    if original is None:
        return settings
    named_types = [name for name in ("torch_dtype", "dtype") if name in settings]
    return settings | dict.fromkeys(named_types, model.precision.store)


def closest_family(model: Transformer, kind: str | None = None) -> tuple[str, Sequence[str]]:
    """Returns the family closest to a model, and the settings that this family lacks."""
    kinds = [k for k, f in families.FAMILIES.items() if f.has_encoder == model.has_encoder]
    problems = {kind: inexpressible(model, kind) for kind in ([kind] if kind else kinds)}

    def distance(family: tuple[str, Sequence[str]]) -> tuple[bool, bool, int]:
        kind, rows = family
        has_other_layers = any(row.startswith("Transformer.feed_forward ") for row in rows)
        # A family that cannot express the model at all has one row, which begins with its name.
        return "".join(rows[:1]).startswith(kind), has_other_layers, len(rows)

    return min(problems.items(), key=distance)


def inexpressible(model: Transformer, kind: str) -> list[str]:
    """Lists the settings of a model that a family lacks."""
    try:
        same = spec_of(settings_of(model, kind), model.precision.store, kind)
        same = with_tensors(same, kind, tied=model.tied, logit_bias=model.logit_bias)
    except UserError as error:
        return [str(error)]
    is_scaled = families.FAMILIES[kind].tensors.final_norm
    free = SCALES if is_scaled and not of_kind(model.norm, RmsNorm).offset else ()
    rows = [row for row in changes(spelled_out(model), spelled_out(same)) if row[0] not in free]
    return [f"{name} = {shown(value)}, legal: {shown(legal)}." for name, value, legal in rows]


def spelled_out(spec: Transformer) -> Transformer:
    """Returns the same model with explicit widths, in the form of `with_shortest_pattern`."""
    spec = with_shortest_pattern(spec)
    experts = spec.feed_forward
    if isinstance(experts, Moe):
        experts = dataclasses.replace(experts, d_ff=experts.width(spec))
    return dataclasses.replace(spec, kv_heads=spec.kv_heads or spec.heads, feed_forward=experts)
