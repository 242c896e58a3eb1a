"""Adapters in PEFT's files: the logits of merged weights, round trips, and what is refused."""

import json
import re
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from configs.errors import UserError
from models.adapters.lora import Lora
from scripts.commands.conversion import hf
from scripts.commands.conversion.flags import ExportPeftFlags, ImportPeftFlags
from scripts.commands.shared_flags import CheckpointFlags, SettingsFlags, Strings
from tests.scripts.conftest import call
from tests.toys import ROOT, WHOLE, toy
from tests.trainer.checkpoints.huggingface.test_convert import (
    BASE,
    export_hf,
    file_bytes,
    golden,
    import_hf,
    logits_of,
    prompts,
    trained_of,
    write_model,
)
from trainer.checkpoints.huggingface import peft
from trainer.checkpoints.huggingface.convert import spec_of
from trainer.checkpoints.huggingface.families import FAMILIES
from trainer.checkpoints.huggingface.weights import ConvertedWeight, TensorInfo
from trainer.checkpoints.manager import Checkpoints
from trainer.checkpoints.restore import ModelRestorer
from trainer.model_dir import ModelDir
from trainer.run import Run

RANK, ALPHA = 3, 5
SETTINGS = {
    "peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "bias": "none", "use_dora": False,
    "lora_dropout": 0.1, "target_modules": ["q_proj", "o_proj", "down_proj"], "rank_pattern": {},
    "base_model_name_or_path": "some/llama", "init_lora_weights": True, "modules_to_save": None,
}  # fmt: skip
TARGETS = {
    "llama": r"(q_proj|o_proj|down_proj)\.weight",
    "qwen3_moe": r"(v_proj|up_proj)\.weight",
    "gpt2": r"(attn\.c_proj|mlp\.c_fc)\.weight",
}
INPUTS_FIRST = "transformer.h."
"""What names weights of inputs x outputs."""


def import_peft(
    folder: Path, base: Path, model_dir: Path, gin_param: Strings = (), gin_file: Strings = ()
) -> None:
    settings = SettingsFlags(gin_param=gin_param, gin_file=gin_file)
    hf.import_peft(
        ImportPeftFlags(input=folder, start_from=base, model_dir=model_dir, settings=settings)
    )


def export_peft(model_dir: Path, output: Path) -> None:
    hf.export_peft(ExportPeftFlags(model=CheckpointFlags(model_dir=model_dir), output=output))


def write_adapter(folder: Path, model: Path, targets: str, dtype: Any = np.float32) -> None:
    """Writes random adapters of a model as PEFT does."""
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(SETTINGS, indent=1))
    rng, tensors = np.random.default_rng(3), {}
    for name, weight in sorted(load_file(model / "model.safetensors").items()):
        if re.search(targets, name):
            stem, (rows, columns) = name.removesuffix(".weight"), np.atleast_2d(weight).shape
            if name.startswith(INPUTS_FIRST):
                rows, columns = columns, rows
            for kind, shape in (("lora_A", (RANK, columns)), ("lora_B", (rows, RANK))):
                tensor = rng.normal(0, 0.5, shape).astype(dtype)
                tensors[f"base_model.model.{stem}.{kind}.weight"] = tensor
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})


def merged_by_numpy(model: Path, adapter: Path) -> dict[str, np.ndarray]:
    """W + alpha / rank * B A, which PEFT's own merge computes."""
    tensors = load_file(model / "model.safetensors")
    factors = load_file(adapter / "adapter_model.safetensors")
    for name, b in factors.items():
        if ".lora_B." in name:
            a = factors[name.replace(".lora_B.", ".lora_A.")]
            product = b.astype(np.float64) @ a.astype(np.float64) * ALPHA / RANK
            path = name.removeprefix("base_model.model.").replace(".lora_B", "")
            product = product.T if path.startswith(INPUTS_FIRST) else product
            tensors[path] = (tensors[path] + product).astype(np.float32)
    return tensors


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models and adapters of each, as files and imported."""
    place = tmp_path_factory.mktemp("peft")
    for name, targets in TARGETS.items():
        write_model(place / name, golden()[name])
        import_hf(place / name, place / f"{name} run")
        write_adapter(place / f"{name} lora", place / name, targets)
        import_peft(place / f"{name} lora", place / f"{name} run", place / f"{name} lora run")
    return place


@pytest.mark.parametrize("name", TARGETS)
def test_logits_are_those_of_merged_weights(folder: Path, tmp_path: Path, name: str) -> None:
    expected = merged_by_numpy(folder / name, folder / f"{name} lora")
    write_model(tmp_path / "merged", golden()[name])
    save_file(expected, tmp_path / "merged" / "model.safetensors", {"format": "pt"})
    import_hf(tmp_path / "merged", tmp_path / "run")
    logits, merged, base = (
        logits_of(trained_of(run, WHOLE), WHOLE, prompts(1))
        for run in (folder / f"{name} lora run", tmp_path / "run", folder / f"{name} run")
    )
    np.testing.assert_allclose(logits, merged, rtol=0, atol=2e-5)
    assert np.abs(logits - base).max() > 0.5
    export_hf(folder / f"{name} lora run", tmp_path / "out")
    for key, tensor in load_file(tmp_path / "out" / "model.safetensors").items():
        np.testing.assert_allclose(tensor, expected[key], rtol=1e-6, atol=1e-6, err_msg=key)


@pytest.mark.parametrize("name", TARGETS)
def test_a_round_trip_keeps_every_bit(folder: Path, tmp_path: Path, name: str) -> None:
    export_peft(folder / f"{name} lora run", tmp_path / "out")
    assert file_bytes(tmp_path / "out") == file_bytes(folder / f"{name} lora")
    files = {file.name for file in (tmp_path / "out").iterdir()}
    assert files == {"adapter_config.json", "adapter_model.safetensors"}
    settings = "adapter_config.json"
    written, read = (x / settings for x in (tmp_path / "out", folder / f"{name} lora"))
    assert written.read_bytes() == read.read_bytes()


def test_adapters_in_bfloat16_come_back(folder: Path, tmp_path: Path) -> None:
    write_adapter(tmp_path / "lora", folder / "llama", TARGETS["llama"], jnp.bfloat16)
    import_peft(tmp_path / "lora", folder / "llama run", tmp_path / "run")
    export_peft(tmp_path / "run", tmp_path / "out")
    assert file_bytes(tmp_path / "out") == file_bytes(tmp_path / "lora")


@pytest.mark.long
def test_training_goes_on_with_them_and_makes_new_ones(folder: Path, tmp_path: Path) -> None:
    run, answers = tmp_path / "run", tmp_path / "answers.jsonl"
    answers.write_text('{"prompt": "ab", "answer": "c d"}\n' * 4)
    settings = (
        "Run.steps=2", "Run.batch_sequences=2", "PromptTask.length=16", "PromptTask.packs=False",
        f"Jsonl.train='{answers}'", f"Jsonl.validation='{answers}'", "Lora.rank=3",
        "Cosine.warmup_steps=1", "Cosine.peak=0.1", f"Run.start_from='{folder / 'llama run'}'",
        "Layout.mesh='data:2'",
    )  # fmt: skip
    files = (folder / "llama run/model.gin", ROOT / "configs/runs/lora.gin")
    flags = [f"--gin_file={file}" for file in files] + [f"--gin_param={one}" for one in settings]
    assert call("train", f"--model_dir={run}", f"--data_dir={tmp_path / 'data'}", *flags) == 0
    export_peft(run, tmp_path / "out")
    exported = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert exported["r"] == 3 and exported["lora_alpha"] == 16
    assert len(exported["target_modules"]) == 7
    again, start = tmp_path / "again", folder / "llama run"
    with pytest.raises(UserError, match=r"Lora\.rank: 3 in the files, 2 set"):
        import_peft(tmp_path / "out", start, again, (*settings, "Lora.rank=2"), [*map(str, files)])
    # The rank of lora.gin is another one, and model.gin has no adapter.
    chosen = [setting for setting in settings if not setting.startswith("Lora.")]
    import_peft(tmp_path / "out", start, again, chosen, [*map(str, files)])
    imported = logits_of(trained_of(again, WHOLE), WHOLE, prompts(1))
    with ModelRestorer(run, ModelDir(run).load().make(Run), WHOLE) as restored:
        first = logits_of(restored.restore(2), WHOLE, prompts(1))
    np.testing.assert_array_equal(first, imported)
    assert call("train", f"--model_dir={again}", f"--data_dir={tmp_path / 'data'}", flags[-1]) == 0
    with Checkpoints(again) as checkpoints:
        assert checkpoints.steps() == [0, 2]


REFUSED = {
    "use_rslora": ({"use_rslora": True}, "use_rslora = True: legal: None"),
    "kind": ({"peft_type": "IA3"}, "peft_type = 'IA3': legal: 'LORA'"),
    "initial weights": ({"init_lora_weights": "pissa"}, "init_lora_weights = 'pissa'"),
    "rank": ({"r": 0}, "Lora.rank = 0"),
    "no rank": ({"r": None, "lora_alpha": None}, "(?s)r is missing.*lora_alpha is missing"),
    "other rank": ({"r": 4}, r"12 of another shape"),
}


def test_settings_tell_the_kind_of_model_and_of_its_weights() -> None:
    kinds = {
        "llama": ("CAUSAL_LM", False),
        "gpt2": ("CAUSAL_LM", True),
        "t5": ("SEQ_2_SEQ_LM", False),
    }
    for kind, expected in kinds.items():
        model = toy(encoder_layers=2) if kind == "t5" else toy()
        made = peft.settings_of(model, Lora(), FAMILIES[kind], ())
        assert (made["task_type"], made["fan_in_fan_out"]) == expected
        peft.check_settings(made | {"init_lora_weights": "gaussian"}, "made")
    # PEFT matches the ends of names, and GPT-2 has a c_proj in attention as well.
    names = "transformer.h.0.mlp.c_proj", "transformer.h.1.mlp.c_proj", "lm_head"
    weights = [
        ConvertedWeight("", (f"base_model.model.{name}.lora_A.weight",), "", {}) for name in names
    ]
    made = peft.settings_of(toy(), Lora(), FAMILIES["gpt2"], weights)
    assert made["target_modules"] == ["lm_head", "mlp.c_proj"]


def test_adapters_of_some_layers_are_refused_by_the_names_that_are_missing(
    folder: Path, tmp_path: Path
) -> None:
    for targets, message in {
        r"layers\.1\..*q_proj\.weight": r"(?s)missing:.*layers\.0\.self_attn\.q_proj\.lora_A",
        "norm": "no adapter of this model: found base_model.model.model.layers.0.input_layernorm",
    }.items():
        write_adapter(tmp_path / "lora", folder / "llama", targets)
        with pytest.raises(UserError, match=message):
            import_peft(tmp_path / "lora", folder / "llama run", tmp_path / "run")


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(folder: Path, tmp_path: Path, case: str) -> None:
    change, message = REFUSED[case]
    write_adapter(tmp_path / "lora", folder / "llama", TARGETS["llama"])
    (tmp_path / "lora" / "adapter_config.json").write_text(json.dumps(SETTINGS | change))
    with pytest.raises(UserError, match=message):
        import_peft(tmp_path / "lora", folder / "llama run", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_products_that_files_join_have_no_adapters_in_peft(folder: Path) -> None:
    settings = {**BASE, "model_type": "phi3"}
    spec = spec_of(settings, "float32", "config.json")
    with pytest.raises(UserError, match=r"0\.self_attn\.qkv_proj\.weight joins several weights"):
        peft.weights_of(spec, Lora(targets=("attention/wq",)), FAMILIES["phi3"])
    stems = [f"base_model.model.model.layers.{i}.self_attn" for i in range(spec.layers)]
    info = TensorInfo((1, 1), "float32")
    others = {f"{stem}.o_proj.lora_{kind}.weight": info for stem in stems for kind in "AB"}
    adapter = peft.adapter_of(spec, FAMILIES["phi3"], SETTINGS, others)
    assert adapter.targets == ("attention/wo",)
    joined = {f"{stem}.qkv_proj.lora_A.weight": info for stem in stems}
    with pytest.raises(UserError, match="joins several weights"):
        peft.adapter_of(spec, FAMILIES["phi3"], SETTINGS, others | joined)


def test_what_peft_lacks_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"no adapters there.  `meshloom export hf` writes the model"
    ):
        export_peft(folder / "llama run", tmp_path / "out")
    with pytest.raises(UserError, match=r"these settings are not the imported model's"):
        import_peft(
            folder / "llama lora", folder / "llama run", tmp_path / "run", ("Lora.alpha = 2.0",)
        )
    write_adapter(tmp_path / "lora", folder / "llama", r"(norm|q_proj)\.weight")
    with pytest.raises(UserError, match="unexpected"):
        import_peft(tmp_path / "lora", folder / "llama run", tmp_path / "run")
    assert not ModelDir(tmp_path / "run").has_run()
