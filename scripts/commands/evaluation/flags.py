"""Defines the flags of `meshloom evaluate` and `meshloom gains`."""

from typing import Annotated

from scripts.commands import shared_flags as shared
from scripts.devices import ProcessFlags
from scripts.flag import Flag, FlagGroup


class TextFlags(FlagGroup):
    """Selects the text to evaluate: a split of the task, files, or a named test set."""

    HEADING = "Text"
    split: Annotated[str | None, Flag(metavar="NAME")] = None
    """Split of the task to evaluate. Default: validation."""
    text_file: Annotated[str | None, Flag(metavar="FILE", name="input")] = None
    """Evaluates this text instead of a split."""
    references: Annotated[shared.Strings, Flag(metavar="FILE")] = ()
    """Reference translations, one per line. Repeat it for several references."""
    test_set: Annotated[str | None, Flag(metavar="NAME")] = None
    """Name of a test set in sacrebleu's cache, such as wmt14/full."""
    languages: Annotated[str | None, Flag(metavar="SRC-TGT")] = None
    """Language pair of the test set, such as en-de."""
    tag: shared.Tag = None


class HarnessFlags(FlagGroup):
    """Selects tasks of lm-evaluation-harness."""

    HEADING = "Harness"
    harness: Annotated[str | None, Flag(metavar="TASK,…")] = None
    """Runs tasks of lm-evaluation-harness instead: names, YAML files or folders."""
    shots: Annotated[int | None, Flag(metavar="K", min=0)] = None
    """Number of few-shot examples before each question. Default: set by each task."""
    limit: Annotated[int | None, Flag(min=1)] = None
    """Runs only the first N examples of each task."""
    apply_chat_template: bool = False
    """Formats prompts as chats, with the chat template of the model's tokenizer."""


class EvaluateFlags(FlagGroup):
    """Computes loss, perplexities per token, word and byte, and BLEU of translations.

    sacrebleu computes BLEU, chrF and TER on raw text, with signatures and bootstrap confidence
    intervals.  With --harness, the command runs tasks of lm-evaluation-harness.
    """

    EXAMPLES = (
        "meshloom evaluate --model_dir=runs/mine --split=test",
        "meshloom evaluate --model_dir=runs/mine --checkpoint=all --json=losses.json",
        "meshloom evaluate --model_dir=runs/mine --test_set=wmt14/full --languages=en-de",
        "meshloom evaluate --model_dir=runs/mine --harness=hellaswag,gsm8k --limit=100",
    )
    data_dir: shared.DataDir = None
    batch_sequences: shared.BatchSequences = None
    logit_scale: Annotated[float, Flag(above=0)] = 1.0
    """Multiplies every logit by this factor."""
    drop_tokens: Annotated[bool, Flag(off="no_drop")] = True
    """Drops tokens beyond the experts' evaluation capacity, as validation during training does;
    --no_drop drops none, as in `decode` and `score`."""
    sentences: Annotated[int | None, Flag(min=0)] = None
    """Translates only N sentences, evenly spaced; 0 computes only the loss."""
    hypotheses: Annotated[str | None, Flag(metavar="FILE", names_output=True)] = None
    """Writes the translations to FILE, one per line. Also writes FILE.source, FILE.reference, and
    FILE.lines, which holds the number of each sentence in its part."""
    json_file: shared.JsonFile = None
    model: shared.CheckpointFlags
    text: TextFlags = TextFlags()
    harness: HarnessFlags = HarnessFlags()
    search: shared.BeamFlags = shared.BeamFlags()
    metrics: shared.MetricFlags = shared.MetricFlags()
    devices: ProcessFlags = ProcessFlags()


class GainsFlags(FlagGroup):
    """Plots the BLEU gains of models over a baseline, per language, by data size."""

    EXAMPLES = (
        "meshloom gains --baseline=dense.json --evaluation=moe.json --output=gains.png",
        "meshloom gains --baseline=bilingual --evaluation=moe.json --output=gains.png",
    )
    baseline: Annotated[str, Flag(metavar="FILE")]
    """Result of `meshloom evaluate --json=FILE` for a model on the parts of a mixture; or a folder
    of results, each of a model for one part and named after the part: bilingual/de.json."""
    evaluation: Annotated[shared.Strings, Flag(metavar="FILE")]
    """The same for a model to compare. Repeat it for several models."""
    output: Annotated[str, Flag(metavar="FILE", names_output=True)]
    """Image to write, such as gains.png."""
    json_file: shared.JsonFile = None
