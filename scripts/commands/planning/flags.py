"""Defines the flags of `meshloom plan` and `meshloom tune`."""

from typing import Annotated

from scripts.commands import shared_flags as shared
from scripts.devices import DeviceFlags
from scripts.flag import Flag, FlagGroup
from trainer.planning.run_cost import ASSUMED


class DecodePlanFlags(shared.SampleFlags):
    """Describes the decoding to plan, by the names of the flags of `meshloom decode`."""

    HEADING = "Decoding, with --decode"
    batch_sequences: Annotated[int | None, Flag(min=1)] = None
    """Number of rows in a batch."""
    beam: shared.Beam = None
    max_tokens: Annotated[int | None, Flag(min=1)] = None
    """Maximum number of new tokens."""
    source_tokens: Annotated[int | None, Flag(min=1)] = None
    """Source tokens of a translation. Default: the row length."""
    prompt_tokens: Annotated[int | None, Flag(min=0)] = None
    """Tokens of the prompt. Default: half the row length; for translation, none."""
    suffix_tokens: Annotated[int | None, Flag(min=1)] = None
    """Tokens of --rescore_suffix, which ranks samples."""
    weights: shared.Weights = "stored"


class RunCostFlags(FlagGroup):
    """Describes what the cost of a whole run assumes."""

    HEADING = "Cost of the whole run, with --topology"

    failures_per_chip_day: Annotated[float, Flag(metavar="N", min=0, max=1)] = (
        ASSUMED.failures_per_chip_day
    )
    """Failures of a chip and day that stop the run. The range is half to four times this."""
    restart_minutes: Annotated[float, Flag(metavar="N", min=0, max=1e4)] = ASSUMED.restart_minutes
    """From a failure until the run begins to read its newest checkpoint."""
    storage_gb_per_s: Annotated[float, Flag(metavar="N", above=0, max=1e4)] = (
        ASSUMED.storage_gb_per_s
    )
    """Gigabytes a second between each host and the storage of checkpoints."""


class PlanFlags(FlagGroup):
    """Predicts memory, FLOPs, traffic and time of the training step of a run.

    With --topology it compiles the step for TPUs or GPUs that this machine does not have (needs
    libtpu or JAX's CUDA plugin); without it, for the devices of this machine or those of
    --simulate_devices.  With --decode it plans decoding: memory, cache, and the time of a token and
    of a whole output, for a batch of --batch_sequences.
    """

    EXAMPLES = (
        "meshloom plan --gin_file=configs/runs/quickstart.gin",
        "meshloom plan --gin_file=configs/runs/quickstart.gin --topology=v3:2x2 --analytic",
    )
    layouts: Annotated[shared.Strings, Flag("", metavar="[LAYOUT]...", is_argument=True)] = ()
    compare: bool = False
    """Plans the run under each of the given layout files."""
    price_per_chip_hour: Annotated[float | None, Flag(metavar="P", min=0, max=1e6)] = None
    """Adds what a whole run costs, in --currency."""
    currency: Annotated[str | None, Flag(metavar="NAME")] = None
    """Currency of --price_per_chip_hour. Default: USD."""
    tokens: Annotated[float | None, Flag(metavar="N", above=0, max=1e18)] = None
    """Tokens of the whole run, as in 1e12, in place of Run.steps or Run.epochs."""
    topology: shared.Topology = None
    analytic: bool = False
    """Predicts from the layout alone, in seconds, and compiles nothing."""
    alternatives: bool = False
    """Also traces other recomputations, dispatches of experts, numbers of microbatches and layouts,
    one at a time, and lists those that are faster, or that fit where the run does not."""
    html: Annotated[str | None, Flag(metavar="FILE", names_output=True)] = None
    """Also writes the result to FILE as a page with charts."""
    json_file: shared.JsonFile = None
    decode: bool = False
    """Plans decoding instead of training."""
    data_dir: shared.DataDir = None
    settings: shared.SavedSettingsFlags = shared.SavedSettingsFlags()
    run_cost: RunCostFlags = RunCostFlags()
    decoding: DecodePlanFlags = DecodePlanFlags()
    devices: DeviceFlags = DeviceFlags()


class TuneFlags(FlagGroup):
    """Searches the settings under which a run's step is the fastest, and writes them to a file.

    Varies what does not change what the step computes: the layout, microbatches, what is
    recomputed, saved or kept on the host, and the compiler options of configs/compilers/.  Batch
    and precision stay.  With --topology it compiles for absent devices (needs their compiler);
    without it, it times steps on this machine.  A log next to --output keeps all trials, so that
    the same command resumes.  --budget=0 only ranks layouts, all of them by their traces, which
    takes seconds.
    """

    EXAMPLES = (
        "meshloom tune --gin_file=configs/runs/quickstart.gin --topology=v3:2x2 --budget=0",
        "meshloom tune --gin_file=configs/runs/quickstart.gin --simulate_devices=4 --budget=5m",
        "meshloom tune --gin_file=configs/models/maxtext_16b.gin --topology=v5e:16x16 --budget=2h",
    )
    topology: shared.Topology = None
    budget: Annotated[str, Flag(metavar="TIME")] = "30m"
    """Time after which no further trial begins, such as 90s, 30m or 2h; 0 ranks layouts alone."""
    best: Annotated[int, Flag(min=1)] = 3
    """How many layouts to try, the first by their traces; and the standard ones and the run's."""
    output: Annotated[str, Flag(metavar="FILE", names_output=True)] = "tuned.gin"
    """Writes the best settings to FILE, and all trials to a log of the same name in .jsonl."""
    json_file: shared.JsonFile = None
    settings: shared.SavedSettingsFlags = shared.SavedSettingsFlags()
    devices: DeviceFlags = DeviceFlags()
