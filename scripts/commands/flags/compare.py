"""Flags of `meshloom compare` and `meshloom gains`."""

from dataclasses import dataclass, field
from typing import Annotated

from scripts.commands.flags.shared import (
    JsonFile,
    Languages,
    MetricFlags,
    References,
    Strings,
    TestSet,
)
from scripts.flag import Flag


@dataclass(frozen=True, kw_only=True)
class ComparedMetricFlags(MetricFlags):
    """How translations are measured, which may ignore case."""

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
    """Draws the gains of models in BLEU over a baseline, by language, against data size."""

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
