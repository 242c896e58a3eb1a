"""Folders like those of released models, with random weights of any size."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from safetensors.numpy import save_file
from tokenizers import decoders, models, pre_tokenizers

from tests.trainer.checkpoints.huggingface import test_translators

# The file of SmolLM2-135M-Instruct, whole.
SMOLLM2: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 576,
    "initializer_range": 0.041666666666666664, "intermediate_size": 1536, "is_llama_config": True,
    "max_position_embeddings": 8192, "mlp_bias": False, "model_type": "llama",
    "num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3,
    "pad_token_id": 2, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_interleaved": False,
    "rope_scaling": None, "rope_theta": 100000, "tie_word_embeddings": True,
    "torch_dtype": "bfloat16", "transformers_version": "4.42.3", "use_cache": True,
    "vocab_size": 49152,
}  # fmt: skip
SMALL = {
    "hidden_size": 36, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 320,
}  # fmt: skip
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content']"
    " + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def write_smollm2(folder: Path, **sizes: int) -> None:
    """Writes a Llama with a tokenizer of bytes and ChatML."""
    config = {**SMOLLM2, **(sizes or SMALL)}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    width, inner = config["hidden_size"], config["intermediate_size"]
    heads = config["num_attention_heads"]
    keys = width // heads * config["num_key_value_heads"]
    shapes = {"embed_tokens": (config["vocab_size"], width), "norm": (width,)}
    for i in range(config["num_hidden_layers"]):
        shapes |= {
            f"layers.{i}.input_layernorm": (width,),
            f"layers.{i}.post_attention_layernorm": (width,),
            f"layers.{i}.self_attn.q_proj": (width, width),
            f"layers.{i}.self_attn.k_proj": (keys, width),
            f"layers.{i}.self_attn.v_proj": (keys, width),
            f"layers.{i}.self_attn.o_proj": (width, width),
            f"layers.{i}.mlp.gate_proj": (inner, width),
            f"layers.{i}.mlp.up_proj": (inner, width),
            f"layers.{i}.mlp.down_proj": (width, inner),
        }
    rng = np.random.default_rng(0)
    tensors = {
        f"model.{name}.weight": rng.normal(len(shape) == 1, 0.04, shape).astype(np.float32)
        for name, shape in shapes.items()
    }
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    pieces = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    pieces += [f"<unused {i}>" for i in range(config["vocab_size"] - len(pieces))]
    tokenizer = tokenizers.Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos_token": SPECIAL[1], "eos_token": SPECIAL[2], "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    ends = {"bos_token_id": 1, "eos_token_id": 2}
    (folder / "generation_config.json").write_text(json.dumps(ends))


def write_opus_mt(folder: Path) -> None:
    """Writes a Marian with a few words of each language."""
    test_translators.write_model(folder, test_translators.golden()["marian"])
    assert {"vocab.json", "source.spm", "target.spm"} <= {file.name for file in folder.iterdir()}
