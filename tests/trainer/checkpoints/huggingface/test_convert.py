"""Decoders: the logits and the greedy texts of Hugging Face's, recorded and live, and round trips.

To record the numbers again, with torch and transformers:
`python -m tests.trainer.checkpoints.huggingface.test_convert`
"""

import copy
import dataclasses
import functools
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from jax.sharding import NamedSharding
from safetensors.numpy import load_file, save_file
from tokenizers import models, pre_tokenizers

from configs.errors import UserError
from layouts.axes import letters_of
from layouts.layout import Layout
from layouts.mesh import make_mesh
from models.api import Batch, Params
from models.attention.multi_head import MultiHead
from models.attention.plain import capped
from models.decoding.sampling import Sampling
from models.feed_forward.mlp import Mlp
from models.feed_forward.moe.layer import Moe
from models.parts import Block
from models.positions.absolute import Learned
from models.positions.rotary import Rotary, YarnScaling
from models.transformer import TransformerModel
from scripts.commands.conversion import folders, hf
from scripts.commands.conversion.flags import ExportHfFlags, ImportHfFlags
from scripts.commands.shared_flags import CheckpointFlags, SettingsFlags, Strings
from tests.scripts.conftest import call
from tests.toys import ROOT, WHOLE
from trainer.checkpoints.huggingface.convert import (
    check_settings,
    closest_family,
    exported_settings,
    inexpressible,
    settings_of,
    spec_of,
)
from trainer.checkpoints.manager import Checkpoints
from trainer.checkpoints.restore import ModelRestorer, TrainedModel
from trainer.decoding.decoder import Decoder, Request
from trainer.metrics.jsonl import read_lines
from trainer.model_dir import ModelDir
from trainer.run import Run
from trainer.step import abstract_state, train_step_spec

GOLDEN = ROOT / "tests" / "golden" / "decoders.json"
CLOSE = 1e-4
ROWS, PLACES, PROMPT, NEW = 2, 20, 6, 10
EVERY = 7
"""Of the recorded logits."""
BEGIN, END = 1, 2
BASE = {
    "vocab_size": 50, "hidden_size": 12, "intermediate_size": 16, "num_hidden_layers": 2,
    "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "bos_token_id": BEGIN, "eos_token_id": END, "pad_token_id": 0,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16, "rope_theta": 500.0,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 4.0,
    "rope_theta": 300.0,
}  # fmt: skip
LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 100.0}
LONGROPE = {
    "rope_type": "longrope", "short_factor": [1.0, 1.25, 2.5], "long_factor": [1.5, 4.0, 9.0],
    "rope_theta": 100.0,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "rope_parameters": LINEAR},
    "llama, tied": {
        "tie_word_embeddings": True, "head_dim": 8, "rms_norm_eps": 0.01, "rope_parameters": LLAMA3,
        "mlp_bias": True,
    },
    "llama, dynamic": {
        "head_dim": 6,
        "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 100.0},
    },
    "mistral": {"sliding_window": 5, "head_dim": 4, "rms_norm_eps": 0.01},
    "qwen2": {"rope_parameters": YARN},
    "qwen3": {
        "head_dim": 4, "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 0,
    },
    "gemma": {"head_dim": 8},
    "mixtral": {"num_local_experts": 5, "num_key_value_heads": 3},
    "qwen3_moe": {
        "head_dim": 4, "num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 20,
        "norm_topk_prob": False,
    },
    "gemma2": {
        "num_hidden_layers": 4, "head_dim": 8, "query_pre_attn_scalar": 5, "sliding_window": 5,
        "attn_logit_softcapping": 3.0, "final_logit_softcapping": 20.0,
        "tie_word_embeddings": False,
    },
    "gemma3_text": {
        "num_hidden_layers": 6, "head_dim": 4, "query_pre_attn_scalar": 7, "sliding_window": 4,
        "tie_word_embeddings": False,
        "rope_parameters": {
            "full_attention": LINEAR,
            "sliding_attention": {"rope_type": "default", "rope_theta": 30.0},
        },
    },
    # Its last turn is not whole, as in most of the family.
    "gemma3_text, uneven": {
        "num_hidden_layers": 5, "head_dim": 4, "num_key_value_heads": 3, "sliding_window": 3,
        "layer_types": [*["sliding_attention", "full_attention"] * 2, "sliding_attention"],
        "final_logit_softcapping": 11.0,
    },
    "qwen3, mixed": {
        "head_dim": 4, "use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1,
    },
    "olmo2": {"num_hidden_layers": 3, "head_dim": 4},
    "olmo3": {
        "num_hidden_layers": 4, "head_dim": 4, "sliding_window": 4,
        "rope_parameters": {
            "full_attention": {**YARN, "rope_theta": 50.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
        },
    },
    "granite": {
        "embedding_multiplier": 3.0, "attention_multiplier": 0.3, "residual_multiplier": 0.22,
        "logits_scaling": 0.7, "num_hidden_layers": 3, "num_key_value_heads": 3,
    },
    "smollm3": {
        "num_hidden_layers": 4, "use_sliding_window": True, "sliding_window": 5, "head_dim": 4,
        "no_rope_layer_interval": 2, "tie_word_embeddings": False,
    },
    "phi3": {"num_hidden_layers": 3, "sliding_window": 5, "num_key_value_heads": 3},
    "phi3, short rows": {
        "hidden_size": 24, "num_attention_heads": 3, "num_key_value_heads": 3,
        "partial_rotary_factor": 0.75, "max_position_embeddings": 256, "rope_scaling": LONGROPE,
        "original_max_position_embeddings": 128,
    },
    "phi3, long rows": {
        "hidden_size": 18, "num_attention_heads": 3, "num_key_value_heads": 3,
        "max_position_embeddings": 256, "rope_scaling": LONGROPE,
        "original_max_position_embeddings": 4,
    },
    "qwen3_moe, mixed": {
        "num_hidden_layers": 4, "num_experts": 5, "num_experts_per_tok": 2, "head_dim": 4,
        "moe_intermediate_size": 8, "mlp_only_layers": [3], "decoder_sparse_step": 2,
    },
    "gpt_oss": {
        "num_hidden_layers": 3, "head_dim": 4, "num_local_experts": 5, "num_experts_per_tok": 2,
        "sliding_window": 5, "rope_parameters": {**YARN, "truncate": False},
    },
    "olmoe": {"num_experts": 5, "num_experts_per_tok": 3, "num_key_value_heads": 3},
    "glm4_moe": {
        "num_hidden_layers": 3, "head_dim": 8, "n_routed_experts": 6, "num_experts_per_tok": 2,
        "moe_intermediate_size": 8, "attention_bias": True, "use_qk_norm": True, "n_group": 3,
        "topk_group": 2, "routed_scaling_factor": 1.7, "rms_norm_eps": 0.01,
    },
    "dots1": {
        "num_hidden_layers": 3, "n_routed_experts": 5, "num_experts_per_tok": 2,
        "n_shared_experts": 1, "moe_intermediate_size": 8, "routed_scaling_factor": 1.3,
        "sliding_window": 4, "max_window_layers": 2, "first_k_dense_replace": 1,
    },
    "deepseek_v3": {
        "num_hidden_layers": 3, "num_key_value_heads": 6, "q_lora_rank": 9, "kv_lora_rank": 10,
        "qk_rope_head_dim": 4, "qk_nope_head_dim": 5, "v_head_dim": 5, "n_routed_experts": 8,
        "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3, "n_shared_experts": 2,
        "first_k_dense_replace": 1, "moe_intermediate_size": 20, "rms_norm_eps": 0.01,
        "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.1},
    },
    "deepseek_v2": {
        "num_key_value_heads": 6, "q_lora_rank": None, "kv_lora_rank": 10, "qk_rope_head_dim": 6,
        "qk_nope_head_dim": 4, "v_head_dim": 4, "n_routed_experts": 5, "num_experts_per_tok": 2,
        "n_shared_experts": 1, "moe_intermediate_size": 8,
    },
    "gpt2": {"n_inner": 20, "max_position_embeddings": 80},
    "gpt2, of four times its width": {
        "tie_word_embeddings": False, "num_hidden_layers": 3, "max_position_embeddings": 80,
    },
}  # fmt: skip
NOT_IN_GPT2 = ("num_key_value_heads", "intermediate_size")
DECODED = ("qwen2", "mistral", "mixtral")
SEEDS = {"gemma2": 6, "gemma3_text": 2, "olmo2": 18, "smollm3": 18, "granite": 4}
"""Of weights with which texts are long."""
LONG = (
    "gemma2", "gemma3_text", "olmo2", "smollm3", "granite", "phi3", "gpt2", "deepseek_v3",
    "deepseek_v2", "qwen3_moe, mixed", "olmoe", "glm4_moe", "dots1",
    "gpt_oss", "olmo3",
)  # fmt: skip
"""Cases with longer texts, and with a bound of the logits' difference by their spread."""
CHOSEN = {"phi3, long rows": ("LongRopeScaling.long = True",)}
"""Settings of imports."""
Case = dict[str, Any]


def import_hf(folder: Path, model_dir: Path, gin_param: Strings = ()) -> None:
    settings = SettingsFlags(gin_param=gin_param)
    hf.import_hf(ImportHfFlags(input=folder, model_dir=model_dir, settings=settings))


def export_hf(model_dir: Path, output: Path, checkpoint: str = "latest") -> None:
    model = CheckpointFlags(model_dir=model_dir, checkpoint=checkpoint)
    hf.export_hf(ExportHfFlags(model=model, output=output))


@functools.cache
def tokenizer() -> str:
    """A tokenizer.json of letters, with the special tokens of the toys."""
    vocab = {token: i for i, token in enumerate(["<pad>", "<s>", "</s>", *"abcdefghij"])}
    made = tokenizers.Tokenizer(models.BPE(vocab, []))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.add_special_tokens(["<pad>", "<s>", "</s>"])
    return made.to_str()


def drawn(seed: int, shapes: dict[str, list[int]]) -> dict[str, np.ndarray]:
    """Weights that matter, all of them; the same wherever they are drawn."""
    rng, tensors = np.random.default_rng(seed), {}
    for name in sorted(shapes):
        shape = shapes[name]
        if ("norm" in name or "ln_" in name) and "weight" in name:
            tensor = rng.uniform(0.5, 1.5, shape)
        elif len(shape) == 1 or re.search("embed|lm_head|wte|wpe", name):
            tensor = rng.normal(0, 1, shape)
        else:
            tensor = rng.normal(0, 1.2 * shape[1] ** -0.5, shape)
        tensors[name] = (np.round(tensor * 64) / 64).astype(np.float32)
    return tensors


def write_model(folder: Path, case: Case) -> None:
    """Writes the model of a case as Hugging Face does."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(case["config"]))
    tensors = drawn(case["seed"], case["shapes"])
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "tokenizer.json").write_text(tokenizer())
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(special))
    (folder / "chat_template.jinja").write_text("{{ messages }}")


def prompts(seed: int) -> np.ndarray:
    tokens = np.random.default_rng(seed).integers(3, BASE["vocab_size"], (ROWS, PLACES))
    tokens[:, 0] = BEGIN
    return tokens


# What Hugging Face says


def record(name: str, folder: Path, seed: int) -> Case:
    """Saves a random model, and returns what it makes of random texts."""
    import transformers

    kind = name.split(",")[0]
    given = copy.deepcopy({**BASE, **CASES[name]})
    if kind == "gpt2":
        given = {name: value for name, value in given.items() if name not in NOT_IN_GPT2}
    config = transformers.AutoConfig.for_model(kind, **given)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    shapes = {n: list(x.shape) for n, x in load_file(folder / "model.safetensors").items()}
    config = json.loads((folder / "config.json").read_text())
    case: Case = {"config": config, "shapes": shapes, "seed": seed}
    write_model(folder, case)
    logits, texts = computed_by_hugging_face(folder, prompts(seed), new_tokens(name))
    return {**case, "logits": logits, "texts": texts}


def new_tokens(name: str) -> int:
    return 64 if name.startswith(LONG) else NEW


def bound_of(name: str, logits: np.ndarray) -> float:
    return 1e-5 * float(np.ptp(logits)) if name.startswith(LONG) else CLOSE


def computed_by_hugging_face(
    folder: Path, tokens: np.ndarray, new: int
) -> tuple[np.ndarray, np.ndarray]:
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        logits = model(torch.from_numpy(tokens)).logits.numpy()
        texts = model.generate(
            torch.from_numpy(tokens[:, :PROMPT]), max_new_tokens=new, do_sample=False
        ).numpy()[:, PROMPT:]
    return logits, np.pad(texts, ((0, 0), (0, new - texts.shape[1])))


@functools.cache
def golden() -> dict[str, Case]:
    cases: dict[str, Case] = json.loads(GOLDEN.read_text())
    return cases


# What comes out here


def trained_of(model_dir: Path, layout: Layout) -> TrainedModel:
    run = ModelDir(model_dir).load((), ()).make(Run)
    with ModelRestorer(model_dir, run, layout) as restored:
        return restored.restore(0)


def logits_of(trained: TrainedModel, layout: Layout, tokens: np.ndarray) -> np.ndarray:
    places = np.tile(np.arange(tokens.shape[1], dtype=np.int32), (len(tokens), 1))
    arrays = {
        "inputs_BL": tokens.astype(np.int32), "targets_BL": np.zeros_like(places),
        "segments_BL": np.ones_like(places), "positions_BL": places,
    }  # fmt: skip
    batch = {
        name: jax.device_put(array, NamedSharding(trained.mesh, layout.place(letters_of(name))))
        for name, array in arrays.items()
    }
    with jax.set_mesh(trained.mesh):
        return np.asarray(teacher_forced(trained.model, trained.params, batch))


@functools.partial(jax.jit, static_argnums=0)
def teacher_forced(model: TransformerModel, params: Params, batch: Batch) -> jax.Array:
    network = model.network(params)
    x_BLD = network(batch, drop_tokens=False)[0] * model.spec.logit_scale
    logits_BLV = model.layout.einsum("BLD,VD->BLV", x_BLD, network.output_weights())
    return capped(logits_BLV, model.spec.logit_cap)


def greedy_texts(
    trained: TrainedModel, tokens: np.ndarray, reads_begin: bool, new: int = NEW
) -> np.ndarray:
    """Continues prompts that begin with BEGIN, which a decoder may add."""
    first = 1 if reads_begin else 0
    requests = [Request(row[first:], new) for row in tokens.tolist()]
    decoder = Decoder(
        trained.model, trained.params, trained.mesh, Sampling(temperature=0), len(tokens),
        begin_id=BEGIN if reads_begin else 0, stop_ids=(END,), reads_begin=reads_begin,
    )  # fmt: skip
    [batch] = decoder.decode(requests)
    texts = np.zeros((len(tokens), new), int)
    for row, [text] in batch:
        ended = [*text.tokens, END][:new]
        texts[row, : len(ended)] = ended
    return texts


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recorded models and what they became; tests may read their folders."""
    place = tmp_path_factory.mktemp("decoders")
    for name, case in golden().items():
        write_model(place / name, case)
        import_hf(place / name, place / f"{name} run", CHOSEN.get(name, ()))
    return place


@pytest.mark.parametrize("name", CASES)
def test_recorded_logits_come_out(imported: Path, name: str) -> None:
    case = golden()[name]
    expected = np.array(case["logits"])
    assert np.ptp(expected, axis=-1).min() > 0.5  # it has opinions
    logits = logits_of(trained_of(imported / f"{name} run", WHOLE), WHOLE, prompts(case["seed"]))
    bound = bound_of(name, expected)
    np.testing.assert_allclose(logits[..., ::EVERY], expected, rtol=0, atol=bound)


@pytest.mark.parametrize("name", ["gemma", "qwen3", "gemma2"])
def test_weights_in_bfloat16_have_the_same_logits(
    imported: Path, tmp_path: Path, name: str
) -> None:
    """The recorded weights have few enough bits: the files hold the same numbers."""
    folder = tmp_path / name
    shutil.copytree(imported / name, folder)
    tensors = load_file(folder / "model.safetensors")
    halved = {key: x.astype(jnp.bfloat16) for key, x in tensors.items()}
    for key, x in tensors.items():
        np.testing.assert_array_equal(halved[key].astype(np.float32), x)
    save_file(halved, folder / "model.safetensors")
    import_hf(folder, tmp_path / "run")
    case, trained = golden()[name], trained_of(tmp_path / "run", WHOLE)
    assert {x.dtype for x in jax.tree.leaves(trained.params)} == {jnp.dtype("bfloat16")}
    logits = logits_of(trained, WHOLE, prompts(case["seed"]))
    expected = np.array(case["logits"])
    np.testing.assert_allclose(logits[..., ::EVERY], expected, rtol=0, atol=CLOSE)


@pytest.mark.few(4)
@pytest.mark.parametrize("name", [*DECODED, *LONG])
def test_recorded_greedy_texts_come_out(imported: Path, name: str) -> None:
    case = golden()[name]
    tokens = prompts(case["seed"])[:, :PROMPT]
    trained = trained_of(imported / f"{name} run", WHOLE)
    texts = greedy_texts(trained, tokens, name != "qwen2", new_tokens(name))
    np.testing.assert_array_equal(texts, case["texts"])


LAYOUTS = {
    "fsdp": Layout(
        mesh="data:2,model:2", rules="batch:data;heads:model", param_rules="d_model:data?"
    ),
    "experts, padded": Layout(mesh="x:2", rules="experts:x+;vocab:x+;d_ff:x;batch:x"),
    "heads, padded": Layout(mesh="x:4", rules="heads:x+;d_ff:x"),
}


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("layout", "name"),
    [
        ("fsdp", "qwen3"), ("experts, padded", "mixtral"), ("heads, padded", "olmo2"),
        ("heads, padded", "gemma2"), ("fsdp", "gpt2"), ("heads, padded", "phi3"),
        ("fsdp", "deepseek_v3"), ("experts, padded", "deepseek_v2"), ("experts, padded", "gpt_oss"),
    ],
)  # fmt: skip
def test_no_layout_changes_the_logits(imported: Path, layout: str, name: str) -> None:
    case, split = golden()[name], LAYOUTS[layout]
    trained = trained_of(imported / f"{name} run", split)
    logits = logits_of(trained, trained.model.layout, prompts(case["seed"]))
    vocab = BASE["vocab_size"]
    np.testing.assert_allclose(
        logits[..., :vocab:EVERY], np.array(case["logits"]), rtol=0, atol=CLOSE
    )


# Round trips


def file_bytes(folder: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Type, shape and bytes of every tensor of a folder."""
    files = [load_file(file) for file in folder.glob("*.safetensors")]
    return {
        n: (x.dtype.name, x.shape, x.tobytes()) for tensors in files for n, x in tensors.items()
    }


@pytest.mark.parametrize("name", CASES)
def test_a_round_trip_keeps_every_bit(imported: Path, tmp_path: Path, name: str) -> None:
    export_hf(imported / f"{name} run", tmp_path / "out")
    assert file_bytes(tmp_path / "out") == file_bytes(imported / name)
    kept = {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()}
    assert kept.keys() == {file.name for file in (imported / name).iterdir()}
    for file in kept.keys() - {"model.safetensors"}:
        assert kept[file] == (imported / name / file).read_bytes()


@pytest.mark.parametrize(("dtype", "name"), [("bfloat16", "mixtral"), ("float16", "llama, tied")])
def test_shards_of_a_half_precision_come_back(
    imported: Path, tmp_path: Path, dtype: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders, "MAX_FILE_BYTES", 2000)
    folder = tmp_path / "sharded"
    shutil.copytree(imported / name, folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    files = {name: f"model-{1 + i % 3:05}-of-00003.safetensors" for i, name in enumerate(names)}
    for file in set(files.values()):
        part = {n: x.astype(jnp.dtype(dtype)) for n, x in tensors.items() if files[n] == file}
        save_file(part, folder / file)
    index = {"weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    import_hf(folder, tmp_path / "run")
    export_hf(tmp_path / "run", tmp_path / "out")
    expected = file_bytes(folder)
    assert file_bytes(tmp_path / "out") == expected
    assert {kind for kind, _, _ in expected.values()} == {dtype}
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == expected.keys()
    assert len(set(index["weight_map"].values())) > 3


@pytest.mark.parametrize("name", CASES)
def test_live_hugging_face_gives_the_same_before_and_after(name: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    case = record(name, tmp_path / "model", seed=77)
    import_hf(tmp_path / "model", tmp_path / "run")
    trained = trained_of(tmp_path / "run", WHOLE)
    logits = logits_of(trained, WHOLE, prompts(77))
    bound = bound_of(name, case["logits"])
    np.testing.assert_allclose(logits, case["logits"], rtol=0, atol=bound)
    texts = greedy_texts(trained, prompts(77)[:, :PROMPT], name != "qwen2", new_tokens(name))
    np.testing.assert_array_equal(texts, case["texts"])
    export_hf(tmp_path / "run", tmp_path / "out")
    logits, texts = computed_by_hugging_face(tmp_path / "out", prompts(77), new_tokens(name))
    np.testing.assert_array_equal(logits, case["logits"])
    np.testing.assert_array_equal(texts, case["texts"])
    before, after = (
        transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict()
        for folder in (tmp_path / "model", tmp_path / "out")
    )
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


# A run that starts from it


def test_a_model_learns_answers_and_is_exported(imported: Path, tmp_path: Path) -> None:
    start, run, answers = imported / "llama run", tmp_path / "run", tmp_path / "answers.jsonl"
    answers.write_text('{"prompt": "ab", "answer": "c d"}\n' * 4)
    settings = (
        "Run.steps=2", "Run.batch_sequences=2", "PromptTask.length=16", "PromptTask.packs=False",
        f"Run.start_from='{start}'", f"Jsonl.train='{answers}'", f"Jsonl.validation='{answers}'",
        "Layout.mesh='data:2'", "Cosine.warmup_steps=1", "Cosine.peak=0.1",
    )  # fmt: skip
    files = (start / "model.gin", ROOT / "configs/runs/finetune.gin", ROOT / "layouts/fsdp.gin")
    flags = [f"--gin_file={file}" for file in files] + [f"--gin_param={one}" for one in settings]
    data = f"--data_dir={tmp_path / 'data'}"
    assert call("train", f"--model_dir={run}", data, *flags) == 0
    assert [line["tokens"] for line in read_lines(run / "metrics.jsonl")][-1] == 6
    export_hf(run, tmp_path / "out")
    before, after = (
        load_file(folder / "model.safetensors") for folder in (imported / "llama", tmp_path / "out")
    )
    assert before.keys() == after.keys()
    assert all((before[name] != after[name]).any() for name in before)
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == "{{ messages }}"


# What is refused


def change(**settings: Any) -> Callable[[Path], object]:
    def apply(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | settings))

    return apply


def remove(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).unlink()


def cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def add_softmax(change: float) -> Callable[[Path], object]:
    """Adds a softmax to a tied model: its embedding, or another."""

    def apply(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        softmax = tensors["model.embed_tokens.weight"] + np.float32(change)
        save_file({**tensors, "lm_head.weight": softmax}, folder / "model.safetensors")

    return apply


def only_tiktoken(folder: Path) -> None:
    (folder / "tokenizer.json").rename(folder / "tokenizer.model")


def miss_a_shard(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {"model.norm.weight": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("name", "damage", "expected"),
    [
        ("llama", shutil.rmtree, ["no such folder"]),
        ("llama", remove("tokenizer.json"), ["tokenizer.json is missing", "save_pretrained"]),
        (
            "llama",
            lambda folder: (folder / "config.json").rename(folder / "adapter_config.json"),
            ["config.json is missing.  `meshloom import peft` reads adapters."],
        ),
        (
            "llama",
            lambda folder: (folder / "config.json").rename(folder / "model.gguf"),
            [
                "config.json is missing.  Legal: a folder with config.json",
                "GGUF files are not read",
            ],
        ),
        ("llama", only_tiktoken, ["tokenizer.json is missing, and tokenizer.model is not a"]),
        (
            "llama",
            lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"),
            ["pytorch_model.bin is a pickle", "AutoModelForCausalLM", "save_pretrained"],
        ),
        (
            "llama",
            lambda folder: (folder / "tokenizer.json").write_text(
                "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n"
            ),
            ["tokenizer.json: a pointer of Git LFS.  `git lfs pull`"],
        ),
        ("llama", miss_a_shard, ["model-00002-of-00002.safetensors is missing"]),
        ("llama", cut, ["model.safetensors: cannot be read as safetensors"]),
        (
            "llama",
            change(model_type="bloom"),
            ["model_type = 'bloom'", "Legal: 'llama', 'mistral'"],
        ),
        ("llama", change(hidden_size="12"), ["hidden_size = '12': legal: an integer"]),
        ("llama", change(rope_interleaved=True), ["rope_interleaved = True: legal: False"]),
        ("llama", change(hidden_act="mish"), ["hidden_act = 'mish'", "'gelu_pytorch_tanh'"]),
        (
            "llama",
            change(mlp_bias=1, quantization_config={}, use_cash=True),
            [
                "3 problems",
                "mlp_bias = 1: legal: true or false",
                "quantization_config",
                "use_cache?",
            ],
        ),
        (
            "llama",
            change(rope_scaling={"rope_type": "ntk"}),
            ["rope_type = 'ntk': legal: 'default', 'linear', 'llama3', 'yarn'"],
        ),
        (
            "phi3, short rows",
            change(rope_parameters={**LONGROPE, "short_factor": [1.0, 2.0]}),
            ["LongRopeScaling.short_factor has 2 numbers.  Legal: 3, one for each pair"],
        ),
        (
            "phi3, short rows",
            change(rope_parameters={**LONGROPE, "long_factor": None, "short_factor": [1, "2", 0]}),
            ["LongRopeScaling.long_factor", "'2'", "0"],
        ),
        (
            "phi3, short rows",
            change(rope_parameters=LONGROPE, original_max_position_embeddings=1),
            ["original_max_position_embeddings = 1: legal: an integer from 2"],
        ),
        (
            "llama",
            change(rope_scaling={"type": "linear", "factor": 2.0, "mscale": 1.0}),
            ["mscale of rope_type 'linear'"],
        ),
        (
            "deepseek_v3",
            change(rope_parameters={**YARN, "factor": None, "mscale": 1.0, "mscale_all_dim": 1.0}),
            ["factor = None: legal: a number above 0"],
        ),
        ("deepseek_v3", change(v_head_dim=6), ["v_head_dim = 6: legal: 5, as qk_nope_head_dim"]),
        ("glm4_moe", change(rope_parameters={"partial_rotary_factor": 0}), ["a number above 0"]),
        ("olmoe", change(num_attention_heads=13), ["13: legal: at most hidden_size, which is 12"]),
        ("dots1", change(num_hidden_layers=10**30), ["an integer from 1 to 10,000"]),
        (
            "llama",
            change(rope_scaling={"type": "linear"}),
            ["factor = None: legal: a number above 0"],
        ),
        (
            "qwen2",
            change(rope_scaling={"type": "linear", "factor": 2.0}),
            ["rope_type = 'yarn' in rope_parameters, 'linear'", "factor = 4.0 in rope_parameters"],
        ),
        ("llama", change(rope_scaling=3), ["rope_scaling = 3: legal: an object or null"]),
        ("llama", change(head_dim=3), ["config.json: Transformer.d_kv = 3", "even"]),
        ("llama", change(intermediate_size=18), ["found (16, 12), legal: (18, 12)"]),
        ("llama", change(num_hidden_layers=1), ["13 unexpected", "model.layers.1"]),
        ("llama", change(attention_bias=False), ["8 unexpected", "q_proj.bias"]),
        ("llama", change(vocab_size=12), ["another shape", "embed_tokens"]),
        ("gemma2", change(use_bidirectional_attention=True), ["legal: None or False"]),
        ("gemma2", change(query_pre_attn_scalar=0), ["query_pre_attn_scalar = 0: legal: a number"]),
        ("gemma2", change(final_logit_softcapping=-1), ["legal: a number above 0 or null"]),
        ("gemma2", change(layer_types=None, num_hidden_layers=3), ["11 unexpected"]),
        ("gemma2", change(sliding_window_pattern=3), ["sliding_window_pattern = 3: legal: 2"]),
        ("smollm3", change(no_rope_layers=[1, 2, 1, 0]), ["legal: 0 or 1 for each layer, or null"]),
        ("smollm3", change(no_rope_layers=[1]), ["no_rope_layers = [1]: legal: 0 or 1 for each"]),
        ("smollm3", change(no_rope_layer_interval=0), ["no_rope_layer_interval = 0: legal"]),
        ("granite", change(logits_scaling=0), ["logits_scaling = 0: legal: a number above 0."]),
        ("granite", change(mlp_bias=True), ["missing", "mlp.gate_proj.bias"]),
        ("qwen2", change(mlp_bias=True), ["mlp_bias = True: legal: False"]),
        ("gemma3_text", change(attn_logit_softcapping=5.0), ["softcapping = 5.0: legal: None"]),
        ("gemma3_text", change(rope_parameters=LINEAR), ["'full_attention' and of 'sliding_att"]),
        (
            "gemma3_text",
            change(rope_parameters={"full_attention": {"rope_type": "ntk"}}),
            ["rope_type = 'ntk': legal: 'default', 'linear', 'llama3', 'yarn'"],
        ),
        ("gemma3_text", change(model_type="gemma3"), ["has no text_config"]),
        ("gemma3_text", change(model_type="gemma3n_text"), ["'gemma3_text'", "'gemma3'."]),
        ("llama", change(hidden_act=["silu"]), ["hidden_act = ['silu']: legal: 'silu'"]),
        ("mistral", change(sliding_window=[None]), ["sliding_window = [None]: legal: an integer"]),
        ("llama", change(rms_norm_eps=10**400), ["rms_norm_eps = inf: legal: a number of"]),
        (
            "llama",
            change(rope_parameters={"rope_theta": 10**400}),
            ["rope_theta = inf: legal: a number above 1"],
        ),
        ("qwen3", change(layer_types=7), ["layer_types = 7: legal: 'full_attention' or"]),
        ("qwen3", change(layer_types=["full_attention"]), ["'sliding_attention' for each layer"]),
        ("qwen3", change(layer_types=["linear_attention"] * 2), ["layer_types = ['linear_att"]),
        (
            "qwen3",
            change(layer_types=None, max_window_layers="0"),
            ["max_window_layers = '0': legal: an integer of at least 0"],
        ),
        ("llama, tied", add_softmax(1.0), ["lm_head.weight differs from model.embed"]),
        ("mixtral", change(num_local_experts=6), ["experts.5.w1.weight", "of another shape"]),
        ("mixtral", change(num_experts_per_tok=6), ["Moe.experts = 5: the router chooses 6"]),
    ],
)
def test_an_import_is_refused_and_leaves_nothing(
    imported: Path, tmp_path: Path, name: str, damage: Callable[[Path], object], expected: list[str]
) -> None:
    folder = shutil.copytree(imported / name, tmp_path / "model")
    damage(folder)
    with pytest.raises(UserError) as error:
        import_hf(folder, tmp_path / "run")
    for words in expected:
        assert words in str(error.value)
    assert not (tmp_path / "run").exists()


def test_settings_that_smollm2_adds_are_read(imported: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(imported / "llama, tied", tmp_path / "model")
    added = {"is_llama_config": True, "rope_interleaved": False, "transformers.js_config": {"a": 1}}
    change(**added)(folder)
    import_hf(folder, tmp_path / "run")
    export_hf(tmp_path / "run", tmp_path / "exported")
    assert json.loads((tmp_path / "exported/config.json").read_text()).items() >= added.items()


@pytest.mark.parametrize(
    ("text", "head", "image"),
    [
        ("language_model.model.", "language_model.", "vision_tower."),
        ("model.language_model.", "", "model.vision_tower."),
    ],
)
def test_the_text_part_of_a_model_of_images_is_imported(
    imported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, head: str,
    image: str,
) -> None:  # fmt: skip
    """Old and new files call its tensors otherwise; an export has the text part alone."""
    name = "gemma3_text"
    folder = shutil.copytree(imported / name, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    shared = {key: config.pop(key) for key in ("tie_word_embeddings", "dtype", "eos_token_id")}
    del config["model_type"], config["architectures"]
    wrapper = {"model_type": "gemma3", "text_config": config, "vision_config": {}, **shared}
    (folder / "config.json").write_text(json.dumps({**wrapper, "quantization_config": {}}))
    with pytest.raises(UserError, match="quantization_config"):
        import_hf(folder, tmp_path / "run")
    (folder / "config.json").write_text(json.dumps(wrapper))
    tensors = load_file(folder / "model.safetensors")
    renamed = {
        text + key.removeprefix("model.") if key.startswith("model.") else head + key: x
        for key, x in tensors.items()
    }
    renamed |= {f"{image}patch.bias": np.ones(3, np.float32)}
    save_file(renamed, folder / "model.safetensors")
    import_hf(folder, tmp_path / "run")
    assert "1 image tensors: Meshloom supports only the text part" in capsys.readouterr().err
    case = golden()[name]
    logits = logits_of(trained_of(tmp_path / "run", WHOLE), WHOLE, prompts(case["seed"]))
    expected = np.array(case["logits"])
    np.testing.assert_allclose(
        logits[..., ::EVERY], expected, rtol=0, atol=bound_of(name, expected)
    )
    export_hf(tmp_path / "run", tmp_path / "out")
    assert file_bytes(tmp_path / "out") == file_bytes(imported / name)
    before, after = (
        json.loads((place / "config.json").read_text())
        for place in (imported / name, tmp_path / "out")
    )
    assert before == after


def test_a_copy_of_the_embedding_is_left_out(
    imported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(imported / "gemma", tmp_path / "model")
    add_softmax(0.0)(folder)
    config = json.loads((folder / "config.json").read_text())
    del config["tie_word_embeddings"]  # Gemma's default
    (folder / "config.json").write_text(json.dumps(config))
    import_hf(folder, tmp_path / "run")
    assert "Left out: lm_head.weight" in capsys.readouterr().err


def test_settings_name_the_end_that_the_files_do_not(
    imported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(imported / "llama", tmp_path / "model")
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>"}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [END, 5]}))
    with pytest.raises(UserError, match=r"Set TokenizerJson\.end"):
        import_hf(folder, tmp_path / "run")
    import_hf(folder, tmp_path / "run", gin_param=("TokenizerJson.end = 'c'",))
    assert "eos_token_id" not in capsys.readouterr().err
    run = ModelDir(tmp_path / "run")
    vocab = run.vocabs(run.load().make(Run).task).target
    assert (vocab.end_id, vocab.stop_ids) == (5, (5, END))
    (folder / "generation_config.json").unlink()
    import_hf(folder, tmp_path / "other run", gin_param=("TokenizerJson.end = 'c'",))
    assert "texts at </s>; `meshloom decode` ends them at c" in capsys.readouterr().err


def test_a_model_without_files_of_hugging_face_is_exported_with_its_tokens(
    imported: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(imported / "mistral run", tmp_path / "run")
    shutil.rmtree(run / "huggingface")
    export_hf(run, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (
        BEGIN,
        END,
        0,
    )


@pytest.mark.parametrize("name", ["llama, tied", "qwen3", "gpt2"])
def test_an_export_multiplies_weights_by_the_scales_that_a_family_lacks(
    imported: Path, tmp_path: Path, name: str
) -> None:
    original = imported / f"{name} run"
    run = shutil.copytree(original, tmp_path / "run")
    shutil.rmtree(run / "huggingface")
    scales = (
        "Transformer.embed_scale = 3.0", "MultiHead.query_scale = 0.4",
        "Transformer.logit_scale = 0.7",
    )  # fmt: skip
    config = ModelDir(run).load((), scales)
    ModelDir(run).save(config, config.make(Run), ModelDir(run).vocabs(config.make(Run).task))
    export_hf(run, tmp_path / "out")
    tokens = prompts(5)
    before, unscaled = (
        logits_of(trained_of(folder, WHOLE), WHOLE, tokens) for folder in (run, original)
    )
    assert np.abs(before - unscaled).max() > 0.5
    import_hf(tmp_path / "out", tmp_path / "again")
    after = logits_of(trained_of(tmp_path / "again", WHOLE), WHOLE, tokens)
    np.testing.assert_allclose(after, before, rtol=0, atol=CLOSE)
    vocabs = ModelDir(tmp_path / "again").vocabs(config.make(Run).task)
    assert vocabs.target.reads_begin and vocabs.target.begin_id == BEGIN


def test_a_model_that_is_trained_here_scores_the_same_in_hugging_faces_library(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch, transformers = map(pytest.importorskip, ("torch", "transformers"))
    text, run = tmp_path / "text.txt", tmp_path / "run"
    lines = ["the layout is  one file,", "and it never changes </s> the result", ""]
    text.write_text("".join(f"{line} {i}\n" for i in range(40) for line in lines))
    settings = (
        "Transformer.layers = 2", "Transformer.vocab = 300", "SentencePiece.size = 300",
        f"TextFiles.train = '{text}'", "Run.steps = 3", "Task.name = 'scored'",
    )  # fmt: skip
    files = ("models/tiny_llama.gin", "tasks/text.gin", "runs/laptop.gin")
    flags = [f"--gin_file=configs/{file}" for file in files]
    flags += [f"--gin_param={setting}" for setting in settings]
    assert call("train", f"--model_dir={run}", f"--data_dir={tmp_path / 'data'}", *flags) == 0
    export_hf(run, tmp_path / "out")
    capsys.readouterr()
    assert call("score", f"--model_dir={run}", f"--input={text}") == 0
    rows = capsys.readouterr().out.splitlines()[1 : 1 + len(lines)]
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for line, row in zip(text.read_text().splitlines(), rows, strict=False):
        ids = torch.tensor([[*tokenizer(line).input_ids, tokenizer.eos_token_id]])
        with torch.no_grad():
            log_p = torch.log_softmax(model(ids).logits[0, :-1], -1)
        score = log_p.gather(1, ids[0, 1:, None]).sum().item()
        assert score == pytest.approx(float(row.split("\t")[0]), abs=1e-3)


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("Transformer.d_ff = 15", "Transformer.d_ff: 16 in the files, 15 set"),
        ("RmsNorm.epsilon = 0.5", "RmsNorm.epsilon: 1e-06 in the files, 0.5 set"),
        ("Task.vocab = @SentencePiece()", "its own vocabulary"),
    ],
)
def test_settings_of_another_model_are_refused(
    imported: Path, tmp_path: Path, setting: str, words: str
) -> None:
    with pytest.raises(UserError, match=re.escape(words)):
        import_hf(imported / "llama", tmp_path / "run", gin_param=(setting,))
    assert not (tmp_path / "run").exists()


def test_settings_that_change_no_prediction_are_free(imported: Path, tmp_path: Path) -> None:
    chosen = ("Transformer.remat = 'full'", "Precision.store = 'bfloat16'", "Run.seed = 3")
    import_hf(imported / "mistral", tmp_path / "run", gin_param=chosen)
    export_hf(tmp_path / "run", tmp_path / "out")
    assert {kind for kind, _, _ in file_bytes(tmp_path / "out").values()} == {"bfloat16"}
    before, after = (
        json.loads((folder / "config.json").read_text())
        for folder in (imported / "mistral", tmp_path / "out")
    )
    assert {n for n in before.keys() | after.keys() if before.get(n) != after.get(n)} == {"dtype"}
    assert after["dtype"] == "bfloat16"


def test_the_first_files_of_gpt2_are_read(imported: Path, tmp_path: Path) -> None:
    """They have no prefix, and constant masks of attention."""
    model = shutil.copytree(imported / "gpt2", tmp_path / "model")
    tensors = {
        name.removeprefix("transformer."): tensor
        for name, tensor in load_file(model / "model.safetensors").items()
    }
    mask = np.ones((1, 1, 4, 4), np.float32)
    save_file({**tensors, "h.0.attn.bias": mask}, model / "model.safetensors")
    import_hf(model, tmp_path / "run")
    export_hf(tmp_path / "run", tmp_path / "out")
    assert file_bytes(tmp_path / "out") == file_bytes(imported / "gpt2")


def test_a_joined_tensor_of_another_shape_is_refused(imported: Path, tmp_path: Path) -> None:
    model, name = shutil.copytree(imported / "phi3", tmp_path / "model"), "gate_up_proj.weight"
    tensors = load_file(model / "model.safetensors")
    name = f"model.layers.1.mlp.{name}"
    save_file({**tensors, name: tensors[name][1:]}, model / "model.safetensors")
    words = rf"{re.escape(name)}: found \(31, 12\), legal: \(32, 12\)"
    with pytest.raises(UserError, match=words):
        import_hf(model, tmp_path / "run")


def test_the_table_of_positions_keeps_its_length(imported: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"Transformer\.length: 80 in the files, 99 set"):
        import_hf(imported / "gpt2", tmp_path / "run", gin_param=("Transformer.length = 99",))


def test_nothing_is_overwritten(imported: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="already contains a run"):
        import_hf(imported / "llama", imported / "qwen2 run")
    with pytest.raises(
        UserError, match=r"contains model\.safetensors, config\.json, tokenizer\.json"
    ):
        export_hf(imported / "llama run", imported / "llama")
    (tmp_path / "notes").write_text("")
    with pytest.raises(UserError, match=r"contains notes\.  Choose a new folder, or an empty one"):
        import_hf(imported / "llama", tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["notes"]


def test_an_import_that_was_killed_before_its_settings_is_repeated(
    imported: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(imported / "qwen2 run", tmp_path / "run")
    (run / "config.gin").rename(run / ".0123.tmp")
    import_hf(imported / "qwen2", run)
    assert (run / "config.gin").is_file()


def test_weights_alone_do_not_train_on(imported: Path) -> None:
    run = ModelDir(imported / "llama run").load((), ()).make(Run)
    mesh = make_mesh(WHOLE)
    abstract = abstract_state(train_step_spec(run, WHOLE), mesh)
    message = r"only weights.*Run\.start_from = '.*llama run'"
    with (
        Checkpoints(imported / "llama run") as checkpoints,
        pytest.raises(UserError, match=message),
    ):
        checkpoints.restore(abstract, 0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"positions": Learned()}, "positions = @Learned(), legal: @Rotary()"),
        ({"feed_forward": Mlp(activation="silu")}, "Mlp.gated = False, legal: True"),
        ({"attention": MultiHead(logit_cap=50.0)}, "MultiHead.logit_cap = 50.0, legal: None"),
        ({"pattern": (Block(norm_places="both"),)}, "Block.norm_places = 'both', legal: 'before'"),
        (
            {"pattern": (Block(), Block(feed_forward=Mlp(activation="relu", gated=True)))},
            "pattern = (@Block(), @Block()), legal: (@Block(),)",
        ),
        ({"logit_cap": 20.0}, "Transformer.logit_cap = 20.0, legal: None"),
        ({"encoder_layers": 1, "attention": MultiHead()}, "t5 cannot express"),
    ],
)
def test_a_model_that_no_family_expresses_is_refused(changes: dict[str, Any], words: str) -> None:
    case = golden()["mistral"]
    spec = spec_of(case["config"], "float32", "config.json")
    assert exported_settings(spec, None)["model_type"] == "mistral"
    scaled = dataclasses.replace(spec, embed_scale=3.0)  # multiplied into the weights
    assert exported_settings(scaled, None)["model_type"] == "mistral"
    with pytest.raises(UserError, match=re.escape(words)):
        exported_settings(dataclasses.replace(spec, **changes), None)


def test_a_family_that_refuses_a_size_is_not_the_closest() -> None:
    spec = spec_of({**BASE, "model_type": "llama"}, "float32", "made")
    model = dataclasses.replace(spec, feed_forward=Moe(experts=4))
    assert inexpressible(model, "glm4_moe")[0].startswith("glm4_moe: Moe.shared_d_ff = 0")
    kind, problems = closest_family(model)
    assert kind in ("mixtral", "qwen3_moe", "olmoe") and all(" = " in row for row in problems)


@pytest.mark.parametrize("name", CASES)
def test_settings_that_are_made_from_a_model_make_the_same_model(name: str) -> None:
    kind = name.split(",")[0]
    spec = spec_of(golden()[name]["config"], "float32", "config.json")
    made = settings_of(spec, kind)
    check_settings(made, "made")
    assert spec_of(made, "float32", "made") == spec
    assert closest_family(spec)[1] == []


def test_a_null_beside_numbers_of_the_magnitude_counts_as_nothing() -> None:
    config = golden()["deepseek_v3"]["config"]
    null = {**config["rope_parameters"], "attention_factor": None}
    config_with_null = {**config, "rope_parameters": null}
    assert spec_of(config_with_null, "float32", "c") == spec_of(config, "float32", "c")


def test_gpt_oss_without_positions_has_those_of_the_family() -> None:
    """And where they are plain, the file says so."""
    config = {**golden()["gpt_oss"]["config"], "rope_parameters": None}
    positions = spec_of(config, "float32", "c").positions
    scaling = YarnScaling(factor=32, original_length=4096, truncate=False)
    assert positions == Rotary(theta=150_000.0, scaling=scaling)
    spec = dataclasses.replace(spec_of(config, "float32", "c"), positions=Rotary(theta=99.0))
    made = settings_of(spec, "gpt_oss")
    assert made["rope_parameters"] == {"rope_type": "default", "rope_theta": 99.0}
    assert spec_of(made, "float32", "made") == spec


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("glm4_moe", {"first_k_dense_replace": 3}),
        ("qwen3_moe, mixed", {"mlp_only_layers": [0, 1, 2, 3]}),
        ("deepseek_v3", {"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1 / 3}}),
    ],
)
def test_what_no_setting_here_says_is_kept(name: str, changed: dict[str, Any]) -> None:
    config = {**golden()[name]["config"], **changed}
    assert exported_settings(spec_of(config, "float32", "c"), config) == config


def test_gemma_reads_its_own_name_of_the_activation() -> None:
    config = {**golden()["gemma2"]["config"], "hidden_act": "relu"}
    assert spec_of(config, "float32", "config.json").feed_forward == Mlp(
        activation="gelu", gated=True
    )
    config["hidden_activation"] = "silu"
    assert spec_of(config, "float32", "config.json").feed_forward == Mlp(
        activation="silu", gated=True
    )
    del config["hidden_activation"]
    assert spec_of(config, "float32", "config.json").feed_forward == Mlp(
        activation="gelu", gated=True
    )


def test_a_block_may_name_the_parts_of_all_layers() -> None:
    spec = spec_of(golden()["qwen3"]["config"], "float32", "config.json")
    block = Block(attention=spec.attention, feed_forward=spec.feed_forward, norm=spec.norm)
    same = dataclasses.replace(spec, attention=MultiHead(), feed_forward=Mlp(), pattern=(block,))
    assert same != spec and exported_settings(same, None) == exported_settings(spec, None)


if __name__ == "__main__":
    import tempfile

    cases = dict(golden())
    for number, name in enumerate(CASES):
        if name in cases:  # remove it from the file to record it again
            continue
        with tempfile.TemporaryDirectory() as folder:
            case = record(name, Path(folder), seed=SEEDS.get(name, number))
        few = np.round(case["logits"][..., ::EVERY].astype(float), 5)
        cases[name] = {**case, "logits": few.tolist(), "texts": case["texts"].tolist()}
        print(name, case["texts"], np.ptp(case["logits"], axis=-1).min())
    GOLDEN.write_text(json.dumps(cases))
