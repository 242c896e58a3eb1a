"""Flags of `meshloom evaluate`."""

from dataclasses import dataclass, field
from typing import Annotated

from scripts.commands.flags.shared import (
    DATA_DIR,
    BatchSequences,
    BeamFlags,
    CheckpointFlags,
    DataDir,
    JsonFile,
    Languages,
    MetricFlags,
    References,
    Tag,
    TestSet,
)
from scripts.devices import ProcessFlags
from scripts.flag import Flag


@dataclass(frozen=True, kw_only=True)
class TextFlags:
    """Which text is evaluated: a split of the task, files, or a test set by its name."""

    HEADING = "Text"
    split: Annotated[str, Flag("Split of the task to evaluate.")] = "validation"
    text_file: Annotated[
        str | None, Flag("Evaluates this text instead of a split.", metavar="FILE", name="input")
    ] = None
    references: References = ()
    test_set: TestSet = None
    languages: Languages = None
    tag: Tag = None


@dataclass(frozen=True, kw_only=True)
class EvaluateFlags:
    """Computes loss and perplexities per token, word and byte, and BLEU of translations.

    BLEU, chrF and TER come from sacrebleu, on raw text, with signatures and confidence intervals
    by bootstrap resampling.
    """

    EXAMPLES = (
        "meshloom evaluate --model_dir=runs/mine --split=test",
        "meshloom evaluate --model_dir=runs/mine --checkpoint=all --json=losses.json",
        "meshloom evaluate --model_dir=runs/mine --test_set=wmt14/full --languages=en-de",
    )
    data_dir: DataDir = DATA_DIR
    batch_sequences: BatchSequences = None
    logit_scale: Annotated[float, Flag("Factor of every logit.")] = 1.0
    drop_tokens: Annotated[
        bool,
        Flag(
            "Experts drop the tokens beyond their evaluation capacity, as validation during "
            "training does, or none, as `decode` and `score` do.",
            off="no_drop",
        ),
    ] = True
    sentences: Annotated[
        int | None,
        Flag(
            "Translates only N sentences, evenly spaced; 0 computes the loss alone.",
            metavar="N",
            min=0,
        ),
    ] = None
    hypotheses: Annotated[
        str | None,
        Flag("Writes the translations to FILE, one per line.", metavar="FILE", names_output=True),
    ] = None
    json_file: JsonFile = None
    model: CheckpointFlags
    text: TextFlags = field(default_factory=TextFlags)
    search: BeamFlags = field(default_factory=BeamFlags)
    metrics: MetricFlags = field(default_factory=MetricFlags)
    devices: ProcessFlags = field(default_factory=ProcessFlags)
