"""Defines the flags of `meshloom plan` and `meshloom tune`."""

from typing import Annotated

from scripts.commands import shared_flags as shared
from scripts.devices import DeviceFlags
from scripts.flag import Flag, FlagGroup
from trainer.planning.run_cost import ASSUMED


class DecodePlanFlags(shared.SampleFlags):
    """Describes the decoding to plan; the names are the same as in `meshloom decode`."""

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
    """Tokens of the suffix that ranks samples (--rescore_suffix of `decode`)."""
    weights: shared.Weights = "stored"


class RunCostFlags(FlagGroup):
    """Describes what the cost of a whole run assumes."""

    HEADING = "Cost of the whole run, with --topology"

    failures_per_chip_day: Annotated[float, Flag(metavar="N", min=0, max=1)] = (
        ASSUMED.failures_per_chip_day
    )
    """Failures per chip and day that stop the run. The range assumes half to four times this."""
    restart_minutes: Annotated[float, Flag(metavar="N", min=0, max=1e4)] = ASSUMED.restart_minutes
    """Minutes from a failure until the run starts to load its newest checkpoint."""
    storage_gb_per_s: Annotated[float, Flag(metavar="N", above=0, max=1e4)] = (
        ASSUMED.storage_gb_per_s
    )
    """Gigabytes per second between each host and the checkpoint storage."""


class PlanFlags(FlagGroup):
    """Predicts the memory, FLOPs, traffic and time of a training step.

    With --topology, it compiles the step for TPUs or GPUs that this machine does not have (needs
    libtpu or JAX's CUDA plugin).  Otherwise, it compiles for the devices of this machine or of
    --simulate_devices.  With --decode, it plans decoding instead: memory, KV cache, and the time
    per token and per output, for a batch of --batch_sequences.
    """

    EXAMPLES = (
        "meshloom plan --gin_file=configs/runs/quickstart.gin",
        "meshloom plan --gin_file=configs/runs/quickstart.gin --topology=v3:2x2 --analytic",
    )
    layouts: Annotated[shared.Strings, Flag("", metavar="[LAYOUT]...", is_argument=True)] = ()
    compare: bool = False
    """Plans the run under each of the given layout files."""
    price_per_chip_hour: Annotated[float | None, Flag(metavar="P", min=0, max=1e6)] = None
    """Adds the cost of the whole run, in --currency."""
    currency: Annotated[str | None, Flag(metavar="NAME")] = None
    """Currency of --price_per_chip_hour. Default: USD."""
    tokens: Annotated[float | None, Flag(metavar="N", above=0, max=1e18)] = None
    """Tokens of the whole run, such as 1e12, instead of Run.steps or Run.epochs."""
    topology: shared.Topology = None
    analytic: bool = False
    """Predicts from the layout alone, within seconds, without compiling."""
    alternatives: bool = False
    """Also tries other remat policies, expert dispatches, microbatch counts and layouts, one at a
    time, and lists those that are faster, or that fit in memory if the run does not."""
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
    """Searches for the settings with the fastest training step, and writes them to a file.

    It varies only settings that do not change the result of a step: the layout, microbatches,
    remat and offloading, and the compiler options of configs/compilers/.  Batch size and precision
    stay the same.  With --topology, it compiles for devices that this machine does not have (needs
    their compiler); otherwise, it times steps on this machine.  A log next to --output records all
    trials, so that the same command resumes.  --budget=0 only ranks all layouts by their traces,
    which takes seconds.
    """

    EXAMPLES = (
        "meshloom tune --gin_file=configs/runs/quickstart.gin --topology=v3:2x2 --budget=0",
        "meshloom tune --gin_file=configs/runs/quickstart.gin --simulate_devices=4 --budget=5m",
        "meshloom tune --gin_file=configs/models/maxtext_16b.gin --topology=v5e:16x16 --budget=2h",
    )
    topology: shared.Topology = None
    budget: Annotated[str, Flag(metavar="TIME")] = "30m"
    """Time after which no new trial starts, such as 90s, 30m or 2h; 0 only ranks layouts."""
    best: Annotated[int, Flag(min=1)] = 3
    """How many of the best-ranked layouts to try, besides the standard ones and the run's."""
    output: Annotated[str, Flag(metavar="FILE", names_output=True)] = "tuned.gin"
    """Writes the best settings to FILE, and all trials to a .jsonl log of the same name."""
    json_file: shared.JsonFile = None
    settings: shared.SavedSettingsFlags = shared.SavedSettingsFlags()
    devices: DeviceFlags = DeviceFlags()
