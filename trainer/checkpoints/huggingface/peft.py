"""Converts adapters between PEFT's files and Meshloom's."""

from collections.abc import Sequence
from dataclasses import replace

from configs.errors import UserError, listed
from layouts.axes import letters_of
from layouts.layout import Layout
from layouts.low_rank import RANK
from models.adapters.lora import Lora
from models.transformer import Transformer
from trainer.checkpoints.huggingface import convert
from trainer.checkpoints.huggingface.families import Family, Settings
from trainer.checkpoints.huggingface.weights import ConvertedWeight, Infos, common_type

SETTINGS, TENSORS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
INITIAL = (True, "gaussian", "orthogonal")  # values that leave the base model unchanged
LEGAL = {"peft_type": ("LORA",), "bias": ("none",), "init_lora_weights": INITIAL}
FREE = (
    "alpha", "auto_mapping", "base_model_name_or_path", "exclude_modules", "fan_in_fan_out",
    "inference_mode", "lora_alpha", "lora_dropout", "megatron_core", "peft_version",
    "qalora_group_size", "r", "revision", "target_modules", "task_type",
)  # fmt: skip
"""Settings that the tensors show or that change no logits; all others must be empty."""
INPUTS_FIRST = "GPT2LMHeadModel"
"""The architecture that stores linear weights as inputs x outputs, except those of adapters."""


def check_settings(settings: Settings, source: object) -> None:
    """Rejects other kinds of adapters."""
    problems = [
        f"{name} = {value!r}: legal: {', '.join(map(repr, LEGAL.get(name, (None,))))}."
        for name, value in settings.items()
        if name not in FREE and value and value not in LEGAL.get(name, ())
    ]
    problems += [f"{n} is missing." for n in ("r", "lora_alpha") if settings.get(n) is None]
    if problems:
        raise UserError(listed(str(source), problems))


def adapter_of(model: Transformer, family: Family, settings: Settings, tensors: Infos) -> Lora:
    """Returns the adapters for which the file has tensors."""
    targets = ["layers_N/*", *["first/*"] * bool(model.first_blocks)]
    targets += ["softmax"] * (not model.tied)
    every = Lora(rank=settings["r"], alpha=settings["lora_alpha"], targets=tuple(targets))
    weights = weights_of(model, every, family, tensors)
    paths = [weight.path for weight in weights if any(name in tensors for name in weight.names)]
    if not paths:
        given = next(iter(tensors), "nothing")
        raise UserError(
            f"{TENSORS}: no adapter of this model: found {given}.  Legal: names such as "
            f"{weights[0].names[0]}."
        )
    names = dict.fromkeys("/".join(path.split("/")[1:-1][-2:]) for path in paths)
    store = common_type(info.dtype for info in tensors.values())
    return replace(every, targets=tuple(names), store=store)


def settings_of(
    model: Transformer, adapter: Lora, family: Family, weights: Sequence[ConvertedWeight]
) -> Settings:
    """Makes the contents of adapter_config.json."""
    task = "SEQ_2_SEQ_LM" if model.has_encoder else "CAUSAL_LM"
    paths = [weight.names[0].removeprefix(PREFIX).split(".") for weight in weights]
    return {
        "peft_type": "LORA", "task_type": task, "base_model_name_or_path": None,
        "r": adapter.rank, "lora_alpha": adapter.alpha, "lora_dropout": 0.0, "bias": "none",
        "target_modules": sorted({".".join(path[-4:-2]) for path in paths}),
        "fan_in_fan_out": family.architecture == INPUTS_FIRST, "inference_mode": True,
    }  # fmt: skip


def weights_of(
    model: Transformer, adapter: Lora, family: Family, tensors: Infos | None = None
) -> list[ConvertedWeight]:
    """Returns the matrices of the adapters of a model, whose spec itself has none.

    With the tensors of a file, joined weights that the file does not adapt are skipped.
    """
    factors, converted = adapter.factors(model.model(Layout()).weights()), []
    if "embed_VD" in factors:
        raise UserError(
            f"Lora.targets = {adapter.targets}: PEFT supports adapters of linear layers, not of "
            "the embedding.  `meshloom export hf` writes the merged model."
        )
    by_path = {weight.path: weight for weight in convert.weights_of(model, family)}
    for path, (kinds, matrices) in factors.items():
        weight = by_path[path]
        whole, _, joined = weight.names[0].partition("/")
        stem = whole.removesuffix(".weight")
        if joined and tensors is not None and not any(stem in name for name in tensors):
            continue
        if joined:
            raise UserError(
                f"{whole} joins several weights, which PEFT can only adapt together.  `meshloom "
                "export hf` writes the merged model."
            )
        sizes = {**weight.sizes, RANK.letter: adapter.rank}
        # The inputs are the side whose axes a product with the weight sums over.
        read = {x for x, kind in zip(letters_of(path), kinds, strict=True) if kind == "i"}
        outputs, inputs = sorted(weight.axes.split(), key=lambda side: not read.isdisjoint(side))
        sides = ("lora_A", f"{RANK.letter} {inputs}"), ("lora_B", f"{outputs} {RANK.letter}")
        stems = [f"{PREFIX}{name.removesuffix('.weight')}" for name in weight.names]
        for path, (kind, axes) in zip(matrices, sides, strict=True):
            names = tuple(f"{stem}.{kind}.weight" for stem in stems)
            converted.append(ConvertedWeight(path, names, axes, sizes))
    return converted
