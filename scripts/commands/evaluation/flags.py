"""Defines the flags of `meshloom evaluate`, `compare` and `gains`."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from scripts.commands.shared_flags import (
    BatchSequences,
    BeamFlags,
    CheckpointFlags,
    DataDir,
    JsonFile,
    Languages,
    MetricFlags,
    References,
    Strings,
    Tag,
    TestSet,
)
from scripts.devices import ProcessFlags
from scripts.flag import Flag


@dataclass(frozen=True, kw_only=True)
class TextFlags:
    """Selects the text to evaluate: a split of the task, files, or a test set by its name."""

    HEADING = "Text"
    split: Annotated[
        str | None, Flag("Split of the task to evaluate. Default: validation.", metavar="NAME")
    ] = None
    text_file: Annotated[
        str | None, Flag("Evaluates this text instead of a split.", metavar="FILE", name="input")
    ] = None
    references: References = ()
    test_set: TestSet = None
    languages: Languages = None
    tag: Tag = None


@dataclass(frozen=True, kw_only=True)
class QuestionFlags:
    """Selects questions, the examples in front of each, and how they are written."""

    HEADING = "Questions"
    questions: Annotated[
        str | None,
        Flag(
            "Answers questions instead of reading a text: JSON lines with question and answer, "
            "one or several accepted texts, measured by exact match; or with question, choices "
            "and the index of the right one, measured by the likelihoods of the choices.",
            metavar="FILE",
        ),
    ] = None
    shots: Annotated[
        int, Flag("Answered questions in front of each question.", metavar="K", min=0)
    ] = 0
    shots_from: Annotated[
        str | None,
        Flag(
            "Takes the shots from this file. Default: from --questions, whose others count.",
            metavar="FILE",
        ),
    ] = None
    shots_seed: Annotated[int, Flag("Seed of the choice of shots.", min=0)] = 0
    template: Annotated[
        str,
        Flag(
            "How a question and its answer are written; \\n is a new line. A model with an encoder "
            "reads what is in front of {answer}.",
            metavar="TEXT",
        ),
    ] = r"Q: {question}\nA: {answer}\n\n"
    answer_field: Annotated[
        str | None,
        Flag("Name of the field with the answers. Default: answer or answers.", metavar="NAME"),
    ] = None
    normalization: Annotated[
        Literal["squad", "triviaqa"],
        Flag(
            "What exact match ignores: case, articles, punctuation and white space, as the "
            "scripts of SQuAD (also for Natural Questions and WebQuestions) or TriviaQA do."
        ),
    ] = "squad"
    show_prompts: Annotated[int, Flag("Prints the first N prompts.", metavar="N", min=0)] = 0


@dataclass(frozen=True, kw_only=True)
class EvaluateFlags:
    """Computes loss and perplexities per token, word and byte, and BLEU of translations.

    BLEU, chrF and TER come from sacrebleu, on raw text, with signatures and confidence intervals
    by bootstrap resampling.  With --questions, computes the share of questions that the model
    answers right.
    """

    EXAMPLES = (
        "meshloom evaluate --model_dir=runs/mine --split=test",
        "meshloom evaluate --model_dir=runs/mine --checkpoint=all --json=losses.json",
        "meshloom evaluate --model_dir=runs/mine --test_set=wmt14/full --languages=en-de",
        "meshloom evaluate --model_dir=runs/mine --questions=dev.jsonl --shots=1",
    )
    data_dir: DataDir = None
    batch_sequences: BatchSequences = None
    logit_scale: Annotated[float, Flag("Factor of every logit.", above=0)] = 1.0
    drop_tokens: Annotated[
        bool,
        Flag(
            "Drops the tokens beyond the experts' evaluation capacity, as validation during "
            "training does; or drops none, as `decode` and `score` do.",
            off="no_drop",
        ),
    ] = True
    sentences: Annotated[
        int | None,
        Flag(
            "Translates only N sentences, evenly spaced; 0 computes only the loss.",
            metavar="N",
            min=0,
        ),
    ] = None
    hypotheses: Annotated[
        str | None,
        Flag(
            "Writes the translations to FILE, one per line, and beside it what they are measured "
            "against: FILE.source, FILE.reference, and FILE.lines with the number of each sentence "
            "in its part.",
            metavar="FILE",
            names_output=True,
        ),
    ] = None
    json_file: JsonFile = None
    model: CheckpointFlags
    text: TextFlags = field(default_factory=TextFlags)
    questions: QuestionFlags = field(default_factory=QuestionFlags)
    search: BeamFlags = field(default_factory=BeamFlags)
    metrics: MetricFlags = field(default_factory=MetricFlags)
    devices: ProcessFlags = field(default_factory=ProcessFlags)


@dataclass(frozen=True, kw_only=True)
class ComparedMetricFlags(MetricFlags):
    """Selects the metrics of translations, which may ignore case."""

    lowercase: Annotated[bool, Flag("Ignores case in BLEU and chrF.")] = False


@dataclass(frozen=True, kw_only=True)
class CompareFlags:
    """Measures translations by BLEU, chrF and TER, and compares several with the first.

    Differences come with p-values by paired bootstrap resampling.
    """

    EXAMPLES = (
        "meshloom compare --system=ours.de --references=test.de",
        "meshloom compare --system=base.de --system=ours.de --test_set=wmt14/full "
        "--languages=en-de",
    )
    system: Annotated[
        Strings,
        Flag(
            "Translations, one per line. Repeat it for several; the first is the baseline.",
            metavar="FILE",
        ),
    ]
    references: References = ()
    test_set: TestSet = None
    languages: Languages = None
    json_file: JsonFile = None
    metrics: ComparedMetricFlags = field(default_factory=ComparedMetricFlags)


@dataclass(frozen=True, kw_only=True)
class GainsFlags:
    """Plots the BLEU gains of models over a baseline, per language, by data size."""

    EXAMPLES = ("meshloom gains --baseline=dense.json --evaluation=moe.json --output=gains.png",)
    baseline: Annotated[
        str,
        Flag(
            "Result of `meshloom evaluate --json=FILE` for a model on the parts of a mixture.",
            metavar="FILE",
        ),
    ]
    evaluation: Annotated[
        Strings,
        Flag("The same for a model to compare. Repeat it for several models.", metavar="FILE"),
    ]
    output: Annotated[
        str, Flag("Picture to write, such as gains.png.", metavar="FILE", names_output=True)
    ]
    json_file: JsonFile = None
