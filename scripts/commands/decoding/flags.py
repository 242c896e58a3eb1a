"""Defines the flags of `meshloom decode` and `score`."""

from typing import Annotated, Literal

from scripts.commands import shared_flags as shared
from scripts.devices import ProcessFlags
from scripts.flag import Flag, FlagGroup

Format = Literal["text", "tsv", "jsonl"]
Input = Annotated[str, Flag("File to read; - is the standard input.", metavar="FILE")]
Output = Annotated[
    str, Flag("File to write; - is the standard output.", metavar="FILE", names_output=True)
]


class DecodeFlags(FlagGroup):
    """Translates sources or continues prompts, one per line.

    By default, translations use beam search of size 4 and continuations are greedy; --beam,
    --temperature and --samples change this.  Several checkpoints, separated by commas, decode as
    an ensemble.  To resume an interrupted command, run it again.
    """

    EXAMPLES = (
        "echo 'Return the' | meshloom decode --model_dir=runs/mine --input=- --temperature=0.7",
        "meshloom decode --model_dir=runs/mine --input=test.en --output=test.de",
        "meshloom decode --model_dir=runs/mine --input=test.en --nbest=4 --format=jsonl",
        "meshloom decode --model_dir=runs/mine --input=prompts.txt --samples=16 "
        "--rescore_suffix=' That is right.'",
    )
    input: Input
    output: Output = "-"
    nbest: Annotated[int | None, Flag(min=1)] = None
    """Writes the N best texts of each line, with scores (see --format)."""
    format: Format | None = None
    """Format of the output: only texts; columns with a header: line, rank, score, log_probability
    and text (tsv); or JSON objects (jsonl). Default: tsv with --nbest, otherwise text."""
    batch_sequences: Annotated[int | None, Flag(min=1)] = None
    """Number of lines in a batch. Default: 64."""
    json_file: shared.JsonFile = None
    model: shared.CheckpointFlags
    search: shared.SearchFlags = shared.SearchFlags()
    devices: ProcessFlags = ProcessFlags()

    @property
    def written_format(self) -> Format:
        """Returns the format of the output; several texts of a line need its number."""
        return self.format or ("text" if self.nbest is None else "tsv")


class ScoreFlags(FlagGroup):
    """Writes the log-likelihood, words and tokens of each line, separated by tabs.

    For a translation model, a line holds a source, a tab and the target to score.  Whitespace
    separates words.  The end of a line is a token, and counts as a word in perplexity per word.
    """

    EXAMPLES = ("meshloom score --model_dir=runs/mine --input=text.txt --output=scores.tsv",)
    input: Input
    output: Output = "-"
    batch_sequences: shared.BatchSequences = None
    tag: shared.Tag = None
    model: shared.CheckpointFlags
    devices: ProcessFlags = ProcessFlags()
