"""Defines the flags of `meshloom evaluate` and `meshloom gains`."""

from typing import Annotated

from scripts.commands import shared_flags as shared
from scripts.devices import ProcessFlags
from scripts.flag import Flag, FlagGroup


class TextFlags(FlagGroup):
    """Selects the text to evaluate: a split of the task, files, or a test set by its name."""

    HEADING = "Text"
    split: Annotated[str | None, Flag(metavar="NAME")] = None
    """Split of the task to evaluate. Default: validation."""
    text_file: Annotated[str | None, Flag(metavar="FILE", name="input")] = None
    """Evaluates this text instead of a split."""
    references: Annotated[shared.Strings, Flag(metavar="FILE")] = ()
    """Reference translations, one per line. Repeat it for several references."""
    test_set: Annotated[str | None, Flag(metavar="NAME")] = None
    """Test set from sacrebleu's cache, by its name, such as wmt14/full."""
    languages: Annotated[str | None, Flag(metavar="SRC-TGT")] = None
    """Language pair of the test set, such as en-de."""
    tag: shared.Tag = None


class HarnessFlags(FlagGroup):
    """Selects tasks of lm-evaluation-harness."""

    HEADING = "Harness"
    harness: Annotated[str | None, Flag(metavar="TASK,…")] = None
    """Scores tasks of lm-evaluation-harness instead of a text: names, YAML files or folders."""
    shots: Annotated[int | None, Flag(metavar="K", min=0)] = None
    """Answered examples in front of each. Default: as each task says."""
    limit: Annotated[int | None, Flag(min=1)] = None
    """Scores only the first N examples of each task."""
    apply_chat_template: bool = False
    """Writes prompts as chats, by the template of the model's tokenizer."""


class EvaluateFlags(FlagGroup):
    """Computes loss and perplexities per token, word and byte, and BLEU of translations.

    BLEU, chrF and TER come from sacrebleu, on raw text, with signatures and confidence intervals
    by bootstrap resampling.  With --harness, scores tasks of lm-evaluation-harness.
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
    """Factor of every logit."""
    drop_tokens: Annotated[bool, Flag(off="no_drop")] = True
    """Drops the tokens beyond the experts' evaluation capacity, as validation during training does;
    or drops none, as `decode` and `score` do."""
    sentences: Annotated[int | None, Flag(min=0)] = None
    """Translates only N sentences, evenly spaced; 0 computes only the loss."""
    hypotheses: Annotated[str | None, Flag(metavar="FILE", names_output=True)] = None
    """Writes the translations to FILE, one per line; also writes FILE.source, FILE.reference, and
    FILE.lines with the number of each sentence in its part."""
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
    of results of models for one part each, named as it is: bilingual/de.json."""
    evaluation: Annotated[shared.Strings, Flag(metavar="FILE")]
    """The same for a model to compare. Repeat it for several models."""
    output: Annotated[str, Flag(metavar="FILE", names_output=True)]
    """Picture to write, such as gains.png."""
    json_file: shared.JsonFile = None
