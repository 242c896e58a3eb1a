"""Defines the flags of `meshloom import` and `meshloom export`."""

from pathlib import Path
from typing import Annotated

from scripts.commands.shared_flags import ModelDir, SettingsFlags, StoredModelFlags
from scripts.flag import Flag, FlagGroup


class ImportHfFlags(FlagGroup):
    """Makes a model directory of a model from Hugging Face, such as a Llama, Qwen, Gemma or T5.

    docs/importing.md lists the families.  The settings choose the task and what training reads.
    """

    EXAMPLES = ("meshloom import hf --input=Llama-3.2-1B --model_dir=runs/llama",)
    input: Annotated[Path, Flag(metavar="DIR")]
    """Directory with config.json, model.safetensors (one file or several) and the tokenizer
    (tokenizer.json, of a T5 spiece.model), as Hugging Face writes them; of adapters,
    adapter_config.json and adapter_model.safetensors."""
    model_dir: ModelDir
    settings: SettingsFlags = SettingsFlags()


class ImportPeftFlags(ImportHfFlags):
    """Makes a model directory of adapters that PEFT has trained (LoRA)."""

    EXAMPLES = ("meshloom import peft --input=lora --start_from=runs/llama --model_dir=runs/lora",)
    start_from: Annotated[Path, Flag(metavar="DIR")]
    """Model directory of the model that the adapters are of."""


class ExportHfFlags(FlagGroup):
    """Writes a model as Hugging Face reads it."""

    EXAMPLES = ("meshloom export hf --model_dir=runs/llama --output=exported",)
    output: Annotated[Path, Flag(metavar="DIR")]
    """New directory for Hugging Face to read."""
    model: StoredModelFlags


class ExportPeftFlags(ExportHfFlags):
    """Writes the adapters of a run as PEFT reads them."""

    EXAMPLES = ("meshloom export peft --model_dir=runs/lora --output=exported",)
