"""Defines the flags of `meshloom doctor`."""

from typing import Annotated

from scripts.commands.shared_flags import DataDir, JsonFile, SavedSettingsFlags
from scripts.devices import ProcessFlags
from scripts.flag import Flag, FlagGroup


class DoctorFlags(FlagGroup):
    """Checks the machine, the cached data and the checkpoints of a run.

    Prints one line per check: ok, warning or error, with the command that fixes the problem.  The
    exit code is 1 if there is an error.
    """

    EXAMPLES = (
        "meshloom doctor --model_dir=runs/mine --data",
        "meshloom doctor --devices --gin_file=layouts/fsdp.gin",
        "srun meshloom doctor --model_dir=/shared/runs/mine",
    )
    data: bool = False
    """Also checks every row of the cached data and every array of a checkpoint."""
    compares_devices: Annotated[bool, Flag(name="devices")] = False
    """Also computes gradients of tiny models on the devices, under the layout of --gin_file, and
    compares them with gradients from a CPU. This takes minutes."""
    data_dir: DataDir = None
    json_file: JsonFile = None
    settings: SavedSettingsFlags = SavedSettingsFlags()
    # Not "devices": `doctor` starts them itself, so that what fails is one of its lines.
    processes: ProcessFlags = ProcessFlags()
