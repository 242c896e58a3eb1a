"""Defines the flags of `meshloom train`, `prepare`, `report` and `supervise`."""

from pathlib import Path
from typing import Annotated

from scripts.commands.shared_flags import DataDir, ModelDir, SettingsFlags, Strings
from scripts.devices import ProcessFlags
from scripts.flag import Flag, FlagGroup


class TrainFlags(FlagGroup):
    """Trains a model, or resumes from its latest complete checkpoint."""

    EXAMPLES = (
        "meshloom train --model_dir=runs/mine --gin_file=configs/runs/quickstart.gin",
        "meshloom train --model_dir=runs/mine --gin_param=Run.steps=2000",
        "meshloom train --model_dir=runs/mine --override --gin_param=Constant.peak=0.0005",
    )
    model_dir: ModelDir
    data_dir: DataDir = None
    override: bool = False
    """Resumes a run with a different optimizer setting, learning rate, batch size or criterion. The
    run records each change; `inspect checkpoint` shows them."""
    local_checkpoint_dir: Path | None = None
    """Directory for local checkpoints on each host, such as /dev/shm.  A restart resumes from them
    if they are newer than the last checkpoint in the model directory.  A replaced host gets its
    shards from replicas on other hosts."""
    profile_steps: Annotated[str | None, Flag(metavar="FIRST:LAST")] = None
    """Profiles these steps, such as 10:13, into the run's directory."""
    settings: SettingsFlags = SettingsFlags()
    devices: ProcessFlags = ProcessFlags()


class PrepareFlags(FlagGroup):
    """Trains the tokenizer, then tokenizes and packs a task, without training a model."""

    EXAMPLES = ("meshloom prepare --gin_file=configs/runs/quickstart.gin",)
    data_dir: DataDir = None
    rebuild: bool = False
    """Rebuilds the cache and replaces it."""
    workers: Annotated[int | None, Flag(min=1)] = None
    """Processes that tokenize and pack; the result is the same. Default: the number of cores."""
    settings: SettingsFlags = SettingsFlags()
    devices: ProcessFlags = ProcessFlags()


class ReportFlags(FlagGroup):
    """Plots the curves of a run and the load of its experts, as images and one HTML page.

    For several runs, the page shows their curves in the same plots, their last metrics, and the
    settings in which they differ.
    """

    EXAMPLES = (
        "meshloom report --model_dir=runs/mine",
        "meshloom report runs/mine runs/other --output=comparison.html",
        "meshloom report runs/mine runs/other --losses=4,3.5",
    )
    runs: Annotated[Strings, Flag("", metavar="[DIR]...", is_argument=True)] = ()
    model_dir: Path | None = None
    """The run's directory, if there is only one run."""
    output: Annotated[str | None, Flag(metavar="FILE", names_output=True)] = None
    """Page for several runs. Default: report.html in the current folder."""
    losses: Annotated[tuple[float, ...] | None, Flag(metavar="LOSS,…")] = None
    """Training losses. For each, the page of several runs shows how many tokens each run needs
    until the mean loss of ten lines of its metrics.jsonl is as low."""
    samples: Annotated[str | None, Flag(metavar="NAME")] = None
    """Name of a file in each model directory that `decode --output` wrote from the same input. The
    page of several runs shows the lines side by side."""
    gin_import_path: Annotated[Strings, Flag(metavar="FOLDER")] = ()
    """Allows the settings of the runs to import, and thus run, the Python modules of FOLDER."""


class SuperviseFlags(FlagGroup):
    """Runs COMMAND, and restarts it when it fails (exit code 1), stalls (75) or is killed.

    It waits longer after each failure, and gives up after the third failure from the same step of
    COMMAND's --model_dir.  It does not restart a command that SIGTERM, SIGHUP or Ctrl-C stops.  It
    exits with the last exit code of COMMAND.
    """

    EXAMPLES = ("meshloom supervise -- meshloom train --model_dir=runs/mine",)
    command: Annotated[Strings, Flag("", metavar="-- COMMAND...", is_argument=True)] = ()
    backoff_s: Annotated[float, Flag(min=0)] = 10.0
    """Seconds before the first restart; doubles after each failure, up to 5 minutes."""
