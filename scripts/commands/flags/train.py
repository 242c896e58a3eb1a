"""Flags of `meshloom train`."""

from dataclasses import dataclass, field

from scripts.commands.flags.shared import DATA_DIR, DataDir, ModelDir, SettingsFlags
from scripts.devices import ProcessFlags


@dataclass(frozen=True, kw_only=True)
class TrainFlags:
    """Trains a model, or continues where its training stopped."""

    EXAMPLES = (
        "meshloom train --model_dir=runs/mine --gin_file=configs/runs/quickstart.gin",
        "meshloom train --model_dir=runs/mine --gin_param=Run.steps=2000",
    )
    model_dir: ModelDir
    data_dir: DataDir = DATA_DIR
    settings: SettingsFlags = field(default_factory=SettingsFlags)
    devices: ProcessFlags = field(default_factory=ProcessFlags)
