"""Defines the flags of `meshloom inspect`."""

from typing import Annotated

from scripts.commands.shared_flags import DataDir, JsonFile, ModelDir, SavedSettingsFlags, Strings
from scripts.devices import DeviceFlags
from scripts.flag import Flag, FlagGroup


class InspectConfigFlags(FlagGroup):
    """Shows the value of each setting and the file that set it."""

    EXAMPLES = ("meshloom inspect config --gin_file=configs/runs/quickstart.gin",)
    data_dir: DataDir = None
    json_file: JsonFile = None
    settings: SavedSettingsFlags = SavedSettingsFlags()


class InspectDataFlags(FlagGroup):
    """Shows packed rows as the model sees them: decoded, with the documents that they contain.

    Or shows which steps of a run read a document, how often they read each part of a mixture, or
    which test sentences occur in the text.  This needs only the settings and the prepared data.
    """

    EXAMPLES = (
        "meshloom inspect data --gin_file=configs/runs/quickstart.gin --rows=0,7,12",
        "meshloom inspect data --model_dir=runs/mine --step=100",
        "meshloom inspect data --model_dir=runs/mine --document=my/books.txt:1204",
        "meshloom inspect data --model_dir=runs/mine --counts --step=5000",
        "meshloom inspect data --model_dir=runs/mine --contamination=test.txt --json=overlaps.json",
    )
    data_dir: DataDir = None
    split: str = "train"
    """Split of the task."""
    rows: Annotated[tuple[int, ...], Flag(metavar="ID,ID…", min=0)] = (0,)
    """IDs of the packed rows to show."""
    step: Annotated[int | None, Flag(min=1, max=2**31 - 1)] = None
    """Shows the rows of this training step instead."""
    document: Annotated[str | None, Flag(metavar="FILE:LINE")] = None
    """Shows the rows that contain a document, and the steps that read them. FILE:LINE-LINE selects
    several documents, FILE all documents of a file."""
    containing: Annotated[str | None, Flag(metavar="TEXT")] = None
    """Shows the rows and steps of the documents that contain this text. Searches all the text."""
    counts: bool = False
    """Shows how many rows and epochs of each part of a mixture are read, up to --step if given."""
    ngram: Annotated[int, Flag(min=1)] = 13
    """Words per n-gram of --contamination; a shorter line is one n-gram."""
    contamination: Annotated[str | None, Flag(metavar="FILE")] = None
    """Shows which lines of FILE share n-grams with the text, and the steps that read these n-grams.
    Searches all the text."""
    json_file: JsonFile = None
    settings: SavedSettingsFlags = SavedSettingsFlags()


class InspectParamsFlags(FlagGroup):
    """Shows the path, axes, shape, placement and bytes per device of every weight.

    It allocates no weights.
    """

    EXAMPLES = ("meshloom inspect params --gin_file=configs/runs/quickstart.gin",)
    json_file: JsonFile = None
    settings: SavedSettingsFlags = SavedSettingsFlags()
    devices: DeviceFlags = DeviceFlags()


class InspectCheckpointFlags(FlagGroup):
    """Shows the arrays of a checkpoint without loading it."""

    EXAMPLES = ("meshloom inspect checkpoint --model_dir=runs/mine --checkpoint=best",)
    model_dir: ModelDir
    checkpoint: Annotated[str, Flag(metavar="latest|best|STEP")] = "latest"
    """Checkpoint to show: the latest, the best, or a step."""
    json_file: JsonFile = None
    gin_import_path: Annotated[Strings, Flag(metavar="FOLDER")] = ()
    """Allows the settings of the run to import, and so to run, the Python modules of FOLDER."""


class InspectLayoutFlags(InspectParamsFlags):
    """Shows problems of a layout for a model, and the placement of each kind of tensor."""

    EXAMPLES = (
        "meshloom inspect layout --gin_file=configs/runs/quickstart.gin "
        "--gin_file=layouts/fsdp.gin --simulate_devices=8",
    )


class InspectSettingsFlags(FlagGroup):
    """Shows all settings that gin files can bind, or only NAME, such as Run or Run.steps."""

    EXAMPLES = ("meshloom inspect settings Run", "meshloom inspect settings Run.steps")
    name: Annotated[str | None, Flag(metavar="[NAME]", is_argument=True)] = None
    """Spec or setting."""
    json_file: JsonFile = None
