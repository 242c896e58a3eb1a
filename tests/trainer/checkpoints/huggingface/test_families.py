"""Each family has a recorded model, and its table agrees with itself and with published sizes."""

import math
from typing import Any

import pytest

from models.positions.rotary import LinearScaling, Rotary
from tests.trainer.checkpoints.huggingface.test_convert import CASES
from trainer.checkpoints.huggingface import convert
from trainer.checkpoints.huggingface.families import DEFAULTS, FAMILIES, IGNORED, SIZES, of_toml


def test_each_family_is_recorded() -> None:
    """Those with an encoder are in the tests beside."""
    decoders = {kind for kind, family in FAMILIES.items() if not family.has_encoder}
    assert {name.split(",")[0] for name in CASES} == decoders


@pytest.mark.parametrize("kind", FAMILIES)
def test_no_setting_is_both_ignored_and_read(kind: str) -> None:
    family = FAMILIES[kind]
    read = {
        *DEFAULTS,
        *SIZES.values(),
        *family.sizes.values(),
        *family.defaults,
        *family.legal,
        *family.aliases.values(),
    }
    # Positions of M2M-100 follow from the id of padding; a file of mBART must say the other one.
    both = {"m2m_100": {"pad_token_id"}, "mbart": {"decoder_start_token_id"}}
    assert read & set(IGNORED) == both.get(kind, set())
    assert set(family.aliases.values()) <= set(family.defaults)


OLD_GEMMA = {
    "cache_implementation": "hybrid", "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-6,
}  # fmt: skip
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3", "attention_bias": False, "attention_dropout": 0.0, "ep_size": 1,
    "hidden_act": "silu", "kv_lora_rank": 512, "moe_layer_freq": 1, "norm_topk_prob": True,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rope_theta": 10000,
    "scoring_func": "sigmoid", "tie_word_embeddings": False, "topk_method": "noaux_tc",
    "v_head_dim": 128,
}  # fmt: skip
DEEPSEEK_YARN = {
    "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096, "type": "yarn",
}  # fmt: skip
# As published, with the number of weights of the text part, and of blocks: first, and repeated.
PUBLISHED: list[tuple[dict[str, Any], int, tuple[int, int]]] = [
    (
        {
            **OLD_GEMMA, "model_type": "gemma2", "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0, "hidden_act": "gelu_pytorch_tanh",
            "hidden_size": 2304, "intermediate_size": 9216, "max_position_embeddings": 8192,
            "num_attention_heads": 8, "num_hidden_layers": 26, "num_key_value_heads": 4,
            "rope_theta": 10000.0, "sliding_window": 4096, "vocab_size": 256000,
        },
        2_614_341_888, (0, 2),
    ),
    (
        {
            **OLD_GEMMA, "model_type": "gemma2", "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0, "hidden_act": "gelu_pytorch_tanh",
            "hidden_size": 3584, "intermediate_size": 14336, "max_position_embeddings": 8192,
            "num_attention_heads": 16, "num_hidden_layers": 42, "num_key_value_heads": 8,
            "rope_theta": 10000.0, "sliding_window": 4096, "sliding_window_size": 4096,
            "vocab_size": 256000,
        },
        9_241_705_984, (0, 2),
    ),
    (
        {
            **OLD_GEMMA, "model_type": "gemma3_text", "hidden_size": 1152,
            "intermediate_size": 6912, "max_position_embeddings": 32768, "num_attention_heads": 4,
            "num_hidden_layers": 26, "num_key_value_heads": 1, "rope_local_base_freq": 10000,
            "rope_scaling": None, "rope_theta": 1000000, "sliding_window": 512,
            "sliding_window_pattern": 6, "vocab_size": 262144,
        },
        999_885_952, (2, 6),
    ),
    (
        {
            "model_type": "gemma3", "mm_tokens_per_image": 256, "vision_config": {},
            "text_config": {
                "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text",
                "num_hidden_layers": 34, "sliding_window": 1024,
                "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            },
        },
        3_880_263_168, (4, 6),
    ),
    (
        {
            "model_type": "smollm3", "hidden_act": "silu", "hidden_size": 2048,
            "intermediate_size": 11008, "max_position_embeddings": 65536, "max_window_layers": 28,
            "mlp_bias": False, "no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 1, 0] * 9,
            "num_attention_heads": 16, "num_hidden_layers": 36, "num_key_value_heads": 4,
            "pretraining_tp": 2, "rms_norm_eps": 1e-06, "rope_scaling": None,
            "rope_theta": 5000000.0, "sliding_window": None, "use_sliding_window": False,
            "vocab_size": 128256, "layer_types": ["full_attention"] * 36,
        },
        3_075_098_624, (0, 4),
    ),
    (
        {
            "model_type": "olmo2", "attention_bias": False, "hidden_act": "silu",
            "hidden_size": 4096, "intermediate_size": 11008, "max_position_embeddings": 4096,
            "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32,
            "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 500000,
            "tie_word_embeddings": False, "vocab_size": 100352,
        },
        7_298_617_344, (0, 1),
    ),
    (
        {
            "model_type": "olmo3", "attention_bias": False, "hidden_act": "silu",
            "hidden_size": 4096, "intermediate_size": 11008, "max_position_embeddings": 65536,
            "layer_types": [*["sliding_attention"] * 3, "full_attention"] * 8,
            "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32,
            "rms_norm_eps": 1e-06, "rope_theta": 500000, "sliding_window": 4096,
            "rope_scaling": {
                "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192,
                "attention_factor": 1.2079441541679836, "beta_fast": 32.0, "beta_slow": 1.0,
            },
            "tie_word_embeddings": False, "vocab_size": 100278,
        },
        7_298_011_136, (0, 4),
    ),
    (
        {
            "model_type": "granite", "attention_dropout": 0.1, "attention_multiplier": 0.015625,
            "embedding_multiplier": 12, "hidden_act": "silu", "hidden_size": 2048,
            "intermediate_size": 8192, "logits_scaling": 8, "max_position_embeddings": 4096,
            "mlp_bias": False, "num_attention_heads": 32, "num_hidden_layers": 40,
            "num_key_value_heads": 8, "residual_multiplier": 0.22, "rms_norm_eps": 1e-05,
            "rope_theta": 10000, "tie_word_embeddings": True, "vocab_size": 49155,
        },
        2_533_531_648, (0, 1),
    ),
    (
        {
            **DEEPSEEK_V3, "first_k_dense_replace": 3, "hidden_size": 7168,
            "intermediate_size": 18432, "max_position_embeddings": 163840,
            "moe_intermediate_size": 2048, "n_group": 8, "n_routed_experts": 256,
            "n_shared_experts": 1, "num_attention_heads": 128, "num_experts_per_tok": 8,
            "num_hidden_layers": 61, "num_key_value_heads": 128, "num_nextn_predict_layers": 1,
            "q_lora_rank": 1536, "rms_norm_eps": 1e-06, "rope_scaling": DEEPSEEK_YARN,
            "routed_scaling_factor": 2.5, "topk_group": 4, "vocab_size": 129280,
        },
        671_026_419_200, (3, 1),
    ),
    (  # Moonlight
        {
            **DEEPSEEK_V3, "aux_loss_alpha": 0.001, "first_k_dense_replace": 1,
            "hidden_size": 2048, "intermediate_size": 11264, "max_position_embeddings": 8192,
            "moe_intermediate_size": 1408, "n_group": 1, "n_routed_experts": 64,
            "n_shared_experts": 2, "num_attention_heads": 16, "num_experts_per_tok": 6,
            "num_hidden_layers": 27, "num_key_value_heads": 16, "num_nextn_predict_layers": 0,
            "q_lora_rank": None, "rms_norm_eps": 1e-05, "rope_theta": 50000.0,
            "routed_scaling_factor": 2.446, "seq_aux": True, "topk_group": 1,
            "vocab_size": 163840,
        },
        15_960_110_208, (1, 1),
    ),
    (
        {
            **DEEPSEEK_V3, "model_type": "deepseek_v2", "aux_loss_alpha": 0.001,
            "first_k_dense_replace": 1, "hidden_size": 2048, "intermediate_size": 10944,
            "max_position_embeddings": 163840, "moe_intermediate_size": 1408, "n_group": 1,
            "n_routed_experts": 64, "n_shared_experts": 2, "norm_topk_prob": False,
            "num_attention_heads": 16, "num_experts_per_tok": 6, "num_hidden_layers": 27,
            "num_key_value_heads": 16, "q_lora_rank": None, "rms_norm_eps": 1e-06,
            "rope_scaling": {**DEEPSEEK_YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
            "routed_scaling_factor": 1.0, "scoring_func": "softmax", "seq_aux": True,
            "topk_group": 1, "topk_method": "greedy", "vocab_size": 102400,
        },
        15_706_484_224, (1, 1),
    ),
    (
        {
            "model_type": "olmoe", "attention_bias": False, "clip_qkv": None,
            "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 1024,
            "max_position_embeddings": 4096, "norm_topk_prob": False, "num_attention_heads": 16,
            "num_experts": 64, "num_experts_per_tok": 8, "num_hidden_layers": 16,
            "num_key_value_heads": 16, "rms_norm_eps": 1e-05, "rope_theta": 10000.0,
            "router_aux_loss_coef": 0.01, "tie_word_embeddings": False, "vocab_size": 50304,
        },
        6_919_161_856, (0, 1),
    ),
    (  # gpt-oss-20b
        {
            "model_type": "gpt_oss", "attention_bias": True, "attention_dropout": 0.0,
            "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880,
            "initial_context_length": 4096, "intermediate_size": 2880,
            "layer_types": ["sliding_attention", "full_attention"] * 12,
            "max_position_embeddings": 131072, "num_attention_heads": 64,
            "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 8,
            "num_local_experts": 32, "rms_norm_eps": 1e-05, "rope_theta": 150000,
            "rope_scaling": {
                "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "rope_type": "yarn",
                "original_max_position_embeddings": 4096, "truncate": False,
            },
            "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0,
            "tie_word_embeddings": False, "vocab_size": 201088,
        },
        20_914_757_184, (0, 2),
    ),
    (  # GLM-4.5-Air without the layer that predicts a second token
        {
            "model_type": "glm4_moe", "attention_bias": True, "attention_dropout": 0.0,
            "first_k_dense_replace": 1, "head_dim": 128, "hidden_act": "silu",
            "hidden_size": 4096, "intermediate_size": 10944, "max_position_embeddings": 131072,
            "moe_intermediate_size": 1408, "n_group": 1, "n_routed_experts": 128,
            "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 96,
            "num_experts_per_tok": 8, "num_hidden_layers": 46, "num_key_value_heads": 8,
            "num_nextn_predict_layers": 1, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-05,
            "rope_scaling": None, "rope_theta": 1000000, "routed_scaling_factor": 1.0,
            "tie_word_embeddings": False, "topk_group": 1, "use_qk_norm": False,
            "vocab_size": 151552,
        },
        106_852_251_264, (1, 1),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("config", "count", "blocks"), PUBLISHED)
def test_published_settings_have_as_many_weights(
    config: dict[str, Any], count: int, blocks: tuple[int, int]
) -> None:
    text = convert.text_part(config)
    convert.check_settings(text, "config.json")
    spec = convert.spec_of(text, "bfloat16", "config.json")
    weights = convert.weights_of(spec, FAMILIES[text["model_type"]])
    assert sum(math.prod(weight.shape) for weight in weights) == count
    assert (len(spec.first_blocks), len(spec.pattern)) == blocks
    if text["model_type"] == "olmo3":
        local, whole = spec.blocks[2:4]
        assert local.attention.window == 4096 and whole.attention.window is None
        assert local.positions == Rotary(theta=500_000.0)
        assert isinstance(whole.positions, Rotary) and whole.positions.scaling is not None
    if text["model_type"] == "gemma3_text":
        local, whole = spec.blocks[4:6]
        scaling = LinearScaling(factor=8) if spec.layers == 34 else None
        assert local.positions == Rotary(theta=1e4) and local.attention.window
        assert whole.positions == Rotary(theta=1e6, scaling=scaling)
        assert whole.attention.window is None


def test_toml_has_null_and_alternatives() -> None:
    values = {"mlp_only_layers": [[], "null"], "head_dim": 128}
    assert of_toml(values) == {"mlp_only_layers": ([], None), "head_dim": 128}


def test_tensors_of_images_have_no_name_in_a_decoder() -> None:
    assert convert.text_name("language_model.model.norm.weight") == "model.norm.weight"
    assert convert.text_name("vision_tower.patch.bias") is None
