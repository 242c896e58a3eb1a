"""Defines the flags of `meshloom plan` and `meshloom layouts`."""

from dataclasses import dataclass, field
from typing import Annotated

from scripts.commands.shared_flags import (
    Beam,
    Flat,
    JsonFile,
    Samples,
    SavedSettingsFlags,
    Strings,
    Temperature,
    TopK,
    Topology,
    TopP,
)
from scripts.devices import DeviceFlags
from scripts.flag import Flag


@dataclass(frozen=True, kw_only=True)
class DecodePlanFlags:
    """Describes the decoding to plan, by the names of the flags of `meshloom decode`."""

    HEADING = "Decoding, with --decode"
    batch_sequences: Annotated[
        int | None, Flag("Number of rows in a batch.", metavar="N", min=1)
    ] = None
    beam: Beam = None
    flat: Flat = True
    temperature: Temperature = None
    top_k: TopK = None
    top_p: TopP = None
    samples: Samples = None
    max_tokens: Annotated[int | None, Flag("Maximum number of new tokens.", metavar="N", min=1)] = (
        None
    )
    source_tokens: Annotated[
        int | None,
        Flag("Source tokens of a translation. Default: the row length.", metavar="N", min=1),
    ] = None
    prompt_tokens: Annotated[
        int | None,
        Flag(
            "Tokens of the prompt. Default: half the row length; for translation, none.",
            metavar="N",
            min=0,
        ),
    ] = None
    suffix_tokens: Annotated[
        int | None,
        Flag("Tokens of --rescore_suffix, which ranks samples.", metavar="N", min=1),
    ] = None


@dataclass(frozen=True, kw_only=True)
class PlanFlags:
    """Predicts memory, FLOPs, traffic and time of the training step of a run.

    With --topology it compiles the step for TPUs that this machine does not have (needs libtpu);
    without it, for the devices of this machine or those of --simulate_devices.  With --decode it
    plans decoding: memory, cache, and the time of a token and of a whole output, for a batch of
    --batch_sequences.
    """

    EXAMPLES = (
        "meshloom plan --gin_file=configs/runs/quickstart.gin",
        "meshloom plan --gin_file=configs/runs/quickstart.gin --topology=v3:2x2 --analytic",
        "meshloom plan --gin_file=configs/runs/quickstart.gin --topology=v3:2x2 --sweep "
        "--html=sweep.html",
    )
    layouts: Annotated[Strings, Flag("", metavar="[LAYOUT]...", is_argument=True)] = ()
    compare: Annotated[bool, Flag("Plans the run under each of the given layout files.")] = False
    sweep: Annotated[
        bool,
        Flag(
            "Compares batches, microbatches, recomputation, precision and layouts that fit, by "
            "their cost. Needs --topology."
        ),
    ] = False
    price_per_chip_hour: Annotated[
        float | None,
        Flag(
            "With --sweep: adds what a whole run costs, in --currency.",
            metavar="P",
            min=0,
            max=1e6,
        ),
    ] = None
    currency: Annotated[str, Flag("Currency of --price_per_chip_hour.", metavar="NAME")] = "USD"
    tokens: Annotated[
        float | None,
        Flag(
            "Tokens of the whole run, as in 1e12, in place of Run.steps.",
            metavar="N",
            above=0,
            max=1e18,
        ),
    ] = None
    topology: Topology = None
    analytic: Annotated[
        bool, Flag("Predicts from the layout alone, in seconds, and compiles nothing.")
    ] = False
    html: Annotated[
        str | None,
        Flag(
            "Also writes the result to FILE as a page with charts.",
            metavar="FILE",
            names_output=True,
        ),
    ] = None
    json_file: JsonFile = None
    decode: Annotated[bool, Flag("Plans decoding instead of training.")] = False
    settings: SavedSettingsFlags = field(default_factory=SavedSettingsFlags)
    decoding: DecodePlanFlags = field(default_factory=DecodePlanFlags)
    devices: DeviceFlags = field(default_factory=DeviceFlags)


@dataclass(frozen=True, kw_only=True)
class LayoutsFlags:
    """Ranks the layouts that a model can have on a slice, the fastest that fits first.

    Without --topology it ranks them on the devices of this machine, whose speed it measures first.
    """

    EXAMPLES = (
        "meshloom layouts --gin_file=configs/runs/quickstart.gin --topology=v3:2x2",
        "meshloom layouts --gin_file=configs/runs/quickstart.gin --simulate_devices=8 "
        "--output=best.gin",
    )
    topology: Topology = None
    verify: Annotated[
        bool,
        Flag(
            "Compiles the best three, the standard layouts and that of the gin files (needs "
            "libtpu); without --topology, runs them.",
            name="search",
        ),
    ] = False
    output: Annotated[
        str | None,
        Flag("Writes the best layout to FILE as a layout file.", metavar="FILE", names_output=True),
    ] = None
    json_file: JsonFile = None
    settings: SavedSettingsFlags = field(default_factory=SavedSettingsFlags)
    devices: DeviceFlags = field(default_factory=DeviceFlags)
