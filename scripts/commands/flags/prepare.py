"""Flags of `meshloom prepare`."""

from dataclasses import dataclass, field
from typing import Annotated

from scripts.commands.flags.shared import DATA_DIR, DataDir, SettingsFlags
from scripts.flag import Flag


@dataclass(frozen=True, kw_only=True)
class PrepareFlags:
    """Trains the tokenizer, tokenizes and packs a task, without training a model."""

    EXAMPLES = ("meshloom prepare --gin_file=configs/runs/quickstart.gin",)
    data_dir: DataDir = DATA_DIR
    rebuild: Annotated[bool, Flag("Replaces a cache that other settings built.")] = False
    settings: SettingsFlags = field(default_factory=SettingsFlags)
