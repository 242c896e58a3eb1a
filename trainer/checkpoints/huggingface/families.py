"""Lists the families of models that Hugging Face has and the Transformer here can be.

A family is a row of `FAMILIES`: what its config.json may say, and what its tensors are called.
"""

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from models.attention.multi_head import AttentionBiases, QkNormOver
from models.feed_forward.mlp import Activation
from models.norms.layer import LayerNorm
from models.norms.rms import RmsNorm
from models.parts import NormPlaces
from models.positions.learned import Learned
from models.positions.relative import Relative
from models.positions.sinusoidal import Sinusoidal

Settings = dict[str, Any]
Names = Mapping[str, Sequence[str]]
"""By the path of a weight here, the name of its tensor and the tensor's axes: each is spelled with
the letters here that it merges."""

SIZES = {
    "vocab": "vocab_size",
    "d_model": "hidden_size",
    "d_ff": "intermediate_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "length": "max_position_embeddings",
}
"""Settings that the file of every decoder has, by their names here."""
ENCODER_SIZES = {"encoder_layers": "encoder_layers"}
DEFAULTS: Settings = {
    "head_dim": None,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
    "rope_theta": 10_000.0,
    "rope_scaling": None,
    "rope_parameters": None,
}
"""Settings of all families, and what each is where a file does not say."""
LEGAL: Mapping[str, tuple[Any, ...]] = {
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "partial_rotary_factor": (None, 1.0),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "sliding_window": (None,),
    "rope_interleaved": (False,),
}
"""Settings with few legal values, unless a family says otherwise."""
IGNORED = (
    "_attn_implementation", "_attn_implementation_autoset", "_name_or_path", "_num_labels",
    "_sliding_window_pattern", "add_bias_logits", "architectures", "attn_implementation",
    "auto_map", "bad_words_ids", "bos_token_id", "cache_implementation", "chunk_size_feed_forward",
    "classif_dropout", "classifier_dropout", "decoder_layerdrop", "decoder_start_token_id",
    "dense_act_fn", "do_sample", "dtype", "early_stopping", "encoder_layerdrop", "eos_token_id",
    "extra_pos_embeddings", "finetuning_task", "forced_eos_token_id", "gradient_checkpointing",
    "id2label", "init_std", "initializer_factor", "initializer_range", "is_decoder",
    "is_gated_act", "is_llama_config", "label2id", "length_penalty", "max_length",
    "max_sequence_length", "model_type", "n_positions", "no_repeat_ngram_size", "num_beams",
    "output_attentions", "output_hidden_states", "output_past", "output_router_logits",
    "pad_token_id", "pretraining_tp", "problem_type", "return_dict", "task_specific_params",
    "temperature", "tie_encoder_decoder", "tokenizer_class", "top_k", "top_p", "torch_dtype",
    "torchscript", "transformers.js_config", "transformers_version", "unk_token_id",
    "unsloth_version", "use_bfloat16", "use_cache",
)  # fmt: skip
"""Settings that change neither a weight nor a logit, such as those of generation."""
# "gelu" without more is another function than the one with tanh, which is here.
ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu",
    "gelu_new": "gelu",
    "relu": "relu",
}

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
    gated_mlp: Names = MappingProxyType({})
    """In place of `mlp`, where feed-forward layers are gated."""
    logit_bias: str = ""
    """Of the logits, which all models of a family have or none."""
    position_bias: str = ""
    """Of relative positions, in each layer or in the first."""
    copies: str = ""
    """Tensors that repeat the embedding in some files."""
    positions: str = ""
    prefix: str = ""
    """What some files leave out."""


_TABLES = tomllib.loads(Path(__file__).with_name("tensors.toml").read_text())
TENSORS = {name: Tensors(**{**_TABLES["llama"], **table}) for name, table in _TABLES.items()}
"""Tensors of a few families; those of the others are called as Llama's."""


class Family(NamedTuple):
    """Describes one family."""

    architecture: str
    """The class of Hugging Face's."""
    sizes: Mapping[str, str] = SIZES
    """Settings that every file has, by their names here."""
    common: Mapping[str, Any] = DEFAULTS
    """Settings of most families."""
    defaults: Mapping[str, Any] = {}
    """Settings in addition to those of all families, or other defaults."""
    legal: Mapping[str, tuple[Any, ...]] = {}
    """Settings with few legal values."""
    fields: Mapping[str, Any] = {}
    """Fields of the Transformer that no setting says."""
    attention: Mapping[str, Any] = {}
    """Fields of its attention that no setting says."""
    block: Mapping[str, Any] = {}
    """Fields of its blocks that no setting says."""
    norm: Mapping[str, Any] = {}
    """Fields of its norms that no setting says."""
    norm_type: type[RmsNorm] | type[LayerNorm] = RmsNorm
    mlp: Mapping[str, Any] = {"gated": True}
    """Fields of its feed-forward layers that no setting says.  Without `gated`, the activation
    says it, as in "gated-gelu"."""
    mlp_width: int | None = None
    """How many times as wide as the model they are, where no setting says."""
    tensors: Tensors = TENSORS["llama"]
    tokens: Mapping[str, int] = {}
    """Ids that an encoder-decoder reads first and writes last, where a file does not say."""
    unties: bool = False
    """Whether files say in any case that the softmax is the embedding; its tensor tells."""
    has_experts: bool = False
    """Whether experts replace the feed-forward layers."""
    activations: Mapping[str, Activation] = ACTIVATIONS
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


WINDOWS: Settings = {
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "layer_types": None,
}
GEMMA = Family(
    "GemmaForCausalLM",
    defaults={
        "num_key_value_heads": 16, "head_dim": 256, "attention_bias": False,
        "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True,
    },
    legal={
        "hidden_activation": (None, "gelu_pytorch_tanh"),
        "use_bidirectional_attention": (None, False),
    },
    fields={"embed_scale": None},
    norm={"offset": True},
    activations={**ACTIVATIONS, "gelu": "gelu"},  # its first files mean the one with tanh
)  # fmt: skip
GEMMA2 = GEMMA._replace(
    architecture="Gemma2ForCausalLM",
    defaults={
        **GEMMA.defaults, "num_key_value_heads": 4,
        "hidden_activation": "gelu_pytorch_tanh",  # the one that is read: hidden_act is not
        "query_pre_attn_scalar": 256, "sliding_window": 4096, "layer_types": None,
        "sliding_window_pattern": 2, "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    legal={
        "use_bidirectional_attention": (None, False), "sliding_window_pattern": (2,),
        "sliding_window_size": (4096,),  # of the 9B and 27B, beside the one that is read
    },
    block={"norm_places": "both"},
    activations=ACTIVATIONS,
    aliases={"hidden_activation": "hidden_act"},
)  # fmt: skip
GEMMA3 = GEMMA2._replace(
    architecture="Gemma3ForCausalLM",
    defaults={
        **GEMMA2.defaults, "vocab_size": 262_208, "hidden_size": 2304, "intermediate_size": 9216,
        "num_hidden_layers": 26, "num_attention_heads": 8, "max_position_embeddings": 131_072,
        "sliding_window_pattern": 6, "attn_logit_softcapping": None,
        "final_logit_softcapping": None, "rope_theta": 1e6,
        "rope_local_base_freq": 10_000.0,
    },
    # Hugging Face reads no cap of its attention.
    legal={"use_bidirectional_attention": (None, False), "attn_logit_softcapping": (None,)},
    attention={"qk_norm": True},
)  # fmt: skip
RELATIVE = {
    "buckets": "relative_attention_num_buckets", "max_distance": "relative_attention_max_distance",
}  # fmt: skip
T5 = Family(
    "T5ForConditionalGeneration",
    sizes={
        **ENCODER_SIZES, "vocab": "vocab_size", "d_model": "hidden_size",
        "d_ff": "intermediate_size", "layers": "num_hidden_layers", "heads": "num_attention_heads",
        "d_kv": "head_dim",
    },
    common={
        "hidden_act": "relu", "rms_norm_eps": 1e-6, "dropout": 0.1, "tie_word_embeddings": True,
    },
    defaults={
        "relative_attention_num_buckets": 32, "relative_attention_max_distance": 128,
        "scale_decoder_outputs": None,
    },
    legal={"is_encoder_decoder": (True,)},
    fields={"embed_scale": 1.0, "positions": Relative(shared=True)},
    attention={"query_scale": 1.0},
    mlp={},
    tensors=TENSORS["t5"],
    tokens={"decoder_start_token_id": 0, "eos_token_id": 1},
    unties=True,
    activations={
        "relu": "relu", "gelu_new": "gelu", "silu": "silu", "gated-relu": "relu",
        "gated-gelu": "gelu", "gated-silu": "silu",  # the plain "gelu" is another function
    },
    names={
        "d_model": "hidden_size", "d_ff": "intermediate_size", "d_kv": "head_dim",
        "num_layers": "encoder_layers", "num_decoder_layers": "num_hidden_layers",
        "num_heads": "num_attention_heads", "feed_forward_proj": "hidden_act",
        "layer_norm_epsilon": "rms_norm_eps", "dropout_rate": "dropout",
    },
)  # fmt: skip
"""Raffel et al. 2020, and version 1.1 with gated activations (Shazeer 2020) and an untied softmax,
which is also mT5 (Xue et al. 2021) and MADLAD-400 (Kudugunta et al. 2023); UMT5 has a bias in each
layer (Chung et al. 2023)."""
MARIAN = Family(
    "MarianMTModel",
    sizes={**SIZES, **ENCODER_SIZES},
    common={
        "hidden_act": "gelu", "attention_dropout": 0.0, "dropout": 0.1, "activation_dropout": 0.0,
        "tie_word_embeddings": True, "scale_embedding": False,
    },
    legal={
        "is_encoder_decoder": (True,), "share_encoder_decoder_embeddings": (True,),
        "tie_word_embeddings": (True,),  # otherwise both stacks have embeddings of their own
        "add_final_layer_norm": (False,), "normalize_before": (False,),
        "normalize_embedding": (False,), "static_position_embeddings": (True,),
    },
    equal={
        "encoder_ffn_dim": "intermediate_size", "encoder_attention_heads": "num_attention_heads",
        "decoder_vocab_size": "vocab_size",
    },
    fields={"positions": Sinusoidal(inclusive=False), "logit_bias": True},
    attention={"biases": "all"},
    block={"norm_places": "sum"},
    norm_type=LayerNorm,
    mlp={"biases": True},
    tensors=TENSORS["marian"],
    tokens={"decoder_start_token_id": 58_100, "eos_token_id": 0},
    names={
        "d_model": "hidden_size", "decoder_ffn_dim": "intermediate_size",
        "decoder_layers": "num_hidden_layers", "activation_function": "hidden_act",
        "decoder_attention_heads": "num_attention_heads",
    },
)  # fmt: skip
"""Junczys-Dowmunt et al. 2018, and the models of OPUS-MT (Tiedemann and Thottingal 2020)."""
FAMILIES: Mapping[str, Family] = {
    "llama": Family(
        "LlamaForCausalLM",
        defaults={"num_key_value_heads": None, "attention_bias": False},
    ),
    "mistral": Family(
        "MistralForCausalLM",
        defaults={"num_key_value_heads": 8, "sliding_window": 4096},
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        defaults={"num_key_value_heads": 32, **WINDOWS},
        legal={"use_mrope": (False,)},
        attention={"biases": "qkv"},
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        defaults={"num_key_value_heads": 32, "head_dim": 128, "attention_bias": False, **WINDOWS},
        attention={"qk_norm": True},
    ),
    "gemma": GEMMA,
    "gemma2": GEMMA2,
    "gemma3_text": GEMMA3,
    "olmo2": Family(
        "Olmo2ForCausalLM",
        defaults={"num_key_value_heads": None, "attention_bias": False, "rms_norm_eps": 1e-5},
        attention={"qk_norm": True, "qk_norm_over": "heads"},
        block={"norm_places": "after"},
    ),
    "granite": Family(
        "GraniteForCausalLM",
        defaults={
            "num_key_value_heads": None, "attention_bias": False, "embedding_multiplier": 1.0,
            "attention_multiplier": 1.0, "residual_multiplier": 1.0, "logits_scaling": 1.0,
        },
    ),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        defaults={
            "num_key_value_heads": 4, "attention_bias": False, "rope_theta": 2e6,
            "tie_word_embeddings": True, **WINDOWS, "sliding_window": None,
            "no_rope_layers": None, "no_rope_layer_interval": 4,
        },
    ),
    "phi3": Family(
        "Phi3ForCausalLM",
        defaults={
            "num_key_value_heads": None, "sliding_window": None, "rms_norm_eps": 1e-5,
            "original_max_position_embeddings": None, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
        },
        tensors=TENSORS["phi3"],
    ),
    "gpt2": Family(
        "GPT2LMHeadModel",
        common={
            "hidden_act": "gelu_new", "rms_norm_eps": 1e-5, "attention_dropout": 0.1,
            "tie_word_embeddings": True,
        },
        defaults={
            "resid_pdrop": 0.1, "embd_pdrop": 0.1, "n_ctx": None, "reorder_and_upcast_attn": False,
            "summary_type": None, "summary_use_proj": None, "summary_activation": None,
            "summary_proj_to_labels": None, "summary_first_dropout": None,
        },
        legal={"scale_attn_weights": (True,), "scale_attn_by_inverse_layer_idx": (False,)},
        fields={"positions": Learned()},
        attention={"biases": "all"},
        norm_type=LayerNorm,
        mlp={"biases": True},
        mlp_width=4,
        tensors=TENSORS["gpt2"],
        names={
            "n_embd": "hidden_size", "n_inner": "intermediate_size",
            "n_layer": "num_hidden_layers", "n_head": "num_attention_heads",
            "n_positions": "max_position_embeddings", "activation_function": "hidden_act",
            "layer_norm_epsilon": "rms_norm_eps", "attn_pdrop": "attention_dropout",
        },
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        defaults={
            "num_key_value_heads": 8, "sliding_window": None, "rms_norm_eps": 1e-5,
            "rope_theta": 1e6, "num_local_experts": 8, "num_experts_per_tok": 2,
            "router_aux_loss_coef": 0.001,
        },
        legal={"router_jitter_noise": (0.0,)},
        has_experts=True,
        tensors=TENSORS["mixtral"],
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        defaults={
            "num_key_value_heads": 4, "head_dim": None, "attention_bias": False,
            "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
            "norm_topk_prob": False, "router_aux_loss_coef": 0.001, **WINDOWS,
        },
        legal={
            "decoder_sparse_step": (1,), "mlp_only_layers": ([], None),
            "use_sliding_window": (False,),
        },
        attention={"qk_norm": True},
        has_experts=True,
        tensors=TENSORS["qwen3_moe"],
        aliases={"num_local_experts": "num_experts"},
    ),
    "t5": T5,
    # Hugging Face's library scales no hidden states of an mT5 before the softmax.
    "mt5": T5._replace(
        architecture="MT5ForConditionalGeneration",
        common={**T5.common, "hidden_act": "gated-gelu"},
        defaults={**T5.defaults, "scale_decoder_outputs": False},
    ),
    "umt5": T5._replace(
        architecture="UMT5ForConditionalGeneration",
        common={**T5.common, "hidden_act": "gated-gelu"},
        fields={**T5.fields, "positions": Relative()},
    ),
    "marian": MARIAN,
}  # fmt: skip
WRAPPERS = {"gemma3": "gemma3_text"}
"""Models of texts and images, and the family of the decoder in each."""
IMAGES = (
    "boi_token_id", "boi_token_index", "eoi_token_id", "eoi_token_index", "image_token_id",
    "image_token_index", "mm_tokens_per_image", "text_config", "vision_config",
)  # fmt: skip
"""Settings of such a model that are not the decoder's."""
TEXT_TENSOR = (
    r"(language_model\.model|model\.language_model)\.(?P<rest>.+)"
    r"|(language_model\.)?(?P<head>lm_head\.weight)"
)
"""Tensors of the decoder in such a model, as old and new files call them."""
