"""Defines what imports and exports share: checks of folders, settings of imported runs, notes."""

import fnmatch
import re
import tempfile
from collections.abc import Iterable
from pathlib import Path

from configs.errors import UserError, brief
from configs.load import Config, load
from configs.paths import absolute
from configs.write import dump
from data.vocabs import SOURCE_FILE, TARGET_FILE
from layouts.layout import Layout
from scripts.commands.common import warn_unused
from scripts.commands.shared_flags import SettingsFlags
from scripts.terminal import print_note
from trainer.model_dir import HUGGINGFACE, ModelDir
from trainer.resume.history import CHECKPOINTS, FILE
from trainer.run import Run

LEFT_BY_IMPORTS = (
    CHECKPOINTS, FILE, "model.gin", HUGGINGFACE, TARGET_FILE, SOURCE_FILE, ".*.tmp"
)  # fmt: skip
"""What an import that was interrupted leaves in a model directory."""


def check_new_run(model_dir: Path) -> None:
    """Refuses a model directory that holds a run already."""
    if model_dir.exists() and not model_dir.is_dir():
        raise UserError(f"--model_dir={model_dir}: is a file.  Choose a folder.")
    if ModelDir(model_dir).has_run():
        raise UserError(f"--model_dir={model_dir}: holds a run already.  Choose another.")
    names = sorted(file.name for file in model_dir.iterdir()) if model_dir.exists() else []
    other = [
        name for name in names if not any(fnmatch.fnmatch(name, left) for left in LEFT_BY_IMPORTS)
    ]
    if other:
        raise UserError(
            f"--model_dir={model_dir}: holds {brief(', '.join(other))}.  Choose a new folder, or "
            "an empty one."
        )


def check_new_folder(folder: Path, names: Iterable[str]) -> None:
    """Refuses a folder that holds one of these files already."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--output={folder}: is a file.  Choose a folder.")
    taken = [name for name in names if (folder / name).exists()]
    if taken:
        raise UserError(f"--output={folder}: holds {', '.join(taken)} already.  Choose another.")


def task_name(library: str, model_dir: Path) -> str:
    """Names the first task of an imported run, as a folder of data_dir may be called."""
    return f"{library}_" + re.sub(r"[^A-Za-z0-9_.-]", "_", absolute(model_dir).name)


def config_of(run: Run, settings: SettingsFlags) -> Config:
    """Returns the settings of a run, under the given ones; warns of those that nothing uses."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "huggingface.gin"
        file.write_text(dump([run]))
        config = load([str(file), *settings.gin_file], settings.gin_param)
    warn_unused(config, Run, Layout)
    return config


def note_import(model_dir: Path, left_out: Iterable[str], types: Iterable[str], count: int) -> None:
    """Prints what was imported, and what was not; each of `left_out` says why."""
    for tensor in left_out:
        print_note(f"Left out: {tensor}.")
    types = sorted(types)
    if len(types) > 1:
        print_note(f"Stored as float32: the tensors are of several types, {' and '.join(types)}.")
    print_note(f"Imported {count:,} weights into {model_dir}.")
