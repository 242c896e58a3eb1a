"""Defines groups of flags that several commands share."""

from pathlib import Path
from typing import Annotated, Literal

from scripts.flag import Flag, FlagGroup

Strings = tuple[str, ...]

ModelDir = Annotated[Path, Flag("The run's directory.")]
DataDir = Annotated[
    Path | None, Flag("Directory of tokenized tasks. Default: the run's, or ~/.cache/meshloom.")
]
JsonFile = Annotated[
    str | None,
    Flag("Also writes the result to FILE as JSON.", metavar="FILE", name="json", names_output=True),
]
BatchSequences = Annotated[
    int | None, Flag("Number of rows per batch. Default: the batch size of the run.", min=1)
]
Tag = Annotated[
    str | None, Flag("Language tag of the target, for a task with several target languages.")
]
Topology = Annotated[
    str | None,
    Flag(
        "Plans for TPUs or GPUs that this machine does not have, such as v3:32x32 or h100:4x8.",
        metavar="KIND:SIZES",
    ),
]
Beam = Annotated[
    int | None,
    Flag("Beam size. Default: 4 for translations; other texts are decoded greedily.", min=1),
]
Weights = Annotated[
    Literal["stored", "int8"],
    Flag("Weights of matmuls: as stored, or quantized to int8 with a scale per channel."),
]


class SettingsFlags(FlagGroup):
    """Selects the settings."""

    HEADING = "Settings"
    gin_file: Annotated[Strings, Flag(metavar="FILE")] = ()
    """Settings file. Repeat the flag for several files; later files win."""
    gin_param: Annotated[Strings, Flag(metavar="'NAME=VALUE'")] = ()
    """One setting, such as 'Run.steps=100'. Overrides files."""
    gin_import_path: Annotated[Strings, Flag(metavar="FOLDER")] = ()
    """Allows gin files to import, and thus run, the Python modules of FOLDER."""


class SavedSettingsFlags(SettingsFlags):
    """Selects settings that override those of a saved run."""

    model_dir: Path | None = None
    """Starts from the settings that a run saved."""


class StoredModelFlags(SettingsFlags):
    """Selects weights of a run, and settings that change for this command."""

    HEADING = "Model"
    model_dir: ModelDir
    checkpoint: Annotated[str, Flag(metavar="latest|best|all|STEP,…")] = "latest"
    """Checkpoint to load: the latest, the best by its evaluation, all, or steps."""
    average: Annotated[str | None, Flag(metavar="N|ema")] = None
    """Averages the weights of the last N checkpoints; ema loads the moving average of Run.ema."""


class CheckpointFlags(StoredModelFlags):
    """Selects weights of a run, what they are rounded to, and settings of this command."""

    weights: Weights = "stored"


class BeamFlags(FlagGroup):
    """Describes a beam search and the longest output."""

    HEADING = "Search"
    beam: Beam = None
    alpha: float = 0.6
    """Exponent of the length penalty."""
    length_penalty: Literal["gnmt", "power"] = "gnmt"
    """Length penalty for n tokens: gnmt is ((5 + n) / 6)^alpha, power is n^alpha."""
    max_tokens: Annotated[int | None, Flag(min=1)] = None
    """Maximum number of new tokens. Default: half the row length; 16 for `serve`; 1.5 x source
    tokens + 10 for a translation (--length_factor and --length_extra of `decode`)."""


class SampleFlags(FlagGroup):
    """Describes how the texts of a line are sampled, and where their KV caches are."""

    flat: Annotated[bool, Flag(off="apart")] = True
    """Keeps all hypotheses of a line in one KV cache (--flat), or each in its own (--apart). The
    results are the same."""
    temperature: Annotated[float | None, Flag(min=0)] = None
    """Samples at this temperature; 0 is greedy."""
    top_k: Annotated[int | None, Flag(metavar="K", min=1)] = None
    """Samples from the K most likely tokens."""
    top_p: Annotated[float | None, Flag(metavar="P", min=0, max=1)] = None
    """Samples from the most likely tokens whose probabilities add up to P."""
    min_p: Annotated[float | None, Flag(metavar="P", min=0, max=1)] = None
    """Samples from tokens with at least P times the probability of the most likely token."""
    samples: Annotated[int | None, Flag(min=1)] = None
    """Samples N texts per line."""


class SearchFlags(SampleFlags, BeamFlags):
    """Describes how to decode, and the limits of the output."""

    consensus: bool = False
    """Chooses the sample that is most similar to all others (minimum Bayes risk, with chrF)."""
    rescore_suffix: Annotated[str | None, Flag(metavar="TEXT")] = None
    """Ranks the samples by the likelihood of TEXT after each. The score is the mean
    log-probability per token of TEXT. Begin TEXT with a space, unless it joins the last word."""
    seed: Annotated[int, Flag(min=0)] = 0
    """Seed of the random choices."""
    min_tokens: Annotated[int, Flag(min=0)] = 0
    """Minimum number of new tokens."""
    length_factor: float = 1.5
    """Maximum number of new tokens per source token of a translation."""
    length_extra: int = 10
    """New tokens of a translation in addition to --length_factor."""
    prefix: str | None = None
    """Text that each translation begins with."""
    tag: Tag = None


class MetricFlags(FlagGroup):
    """Selects the metrics of translations."""

    HEADING = "Metrics"
    tokenize: Annotated[str | None, Flag(metavar="NAME")] = None
    """sacrebleu's tokenizer for BLEU, such as 13a or intl."""
    resamples: Annotated[int, Flag(min=0)] = 1000
    """Number of bootstrap resamples; 0 computes no confidence intervals."""
    ter: Annotated[bool, Flag(off="no_ter")] = True
    """Computes TER, the slowest metric."""
