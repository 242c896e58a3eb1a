"""Defines the flags of `meshloom import` and `meshloom export`."""

from pathlib import Path
from typing import Annotated

from scripts.commands.shared_flags import ModelDir, SettingsFlags, StoredModelFlags
from scripts.flag import Flag, FlagGroup


class ImportHfFlags(FlagGroup):
    """Converts a Hugging Face model, such as Llama, Qwen, Gemma or T5, to a model directory.

    docs/importing.md lists the families.  The settings choose the task and its training data.
    """

    EXAMPLES = ("meshloom import hf --input=Llama-3.2-1B --model_dir=runs/llama",)
    input: Annotated[Path, Flag(metavar="DIR")]
    """Directory that Hugging Face wrote: config.json, model.safetensors (one file or several) and
    the tokenizer (tokenizer.json; spiece.model for T5). For adapters: adapter_config.json and
    adapter_model.safetensors."""
    model_dir: ModelDir
    settings: SettingsFlags = SettingsFlags()


class ImportPeftFlags(ImportHfFlags):
    """Converts LoRA adapters trained with PEFT to a model directory."""

    EXAMPLES = ("meshloom import peft --input=lora --start_from=runs/llama --model_dir=runs/lora",)
    start_from: Annotated[Path, Flag(metavar="DIR")]
    """Model directory of the base model of the adapters."""


class ExportHfFlags(FlagGroup):
    """Writes a model in the format of Hugging Face."""

    EXAMPLES = ("meshloom export hf --model_dir=runs/llama --output=exported",)
    output: Annotated[Path, Flag(metavar="DIR")]
    """New directory for the exported files."""
    model: StoredModelFlags


class ExportPeftFlags(ExportHfFlags):
    """Writes the adapters of a run in the format of PEFT."""

    EXAMPLES = ("meshloom export peft --model_dir=runs/lora --output=exported",)
