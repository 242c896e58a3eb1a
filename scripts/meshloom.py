"""The `meshloom` command: flags, then one call each."""

import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import click
from click.core import ParameterSource

from configs.errors import RunError, UserError

Command = Callable[..., None]
DATA_DIR = Path("~/.cache/meshloom")


def options(*names: str) -> Callable[[Command], Command]:
    """Adds flags that several commands share, and starts the devices that they ask for."""

    def decorate(command: Command) -> Command:
        @functools.wraps(command)
        def run(
            simulate_devices: int | None,
            coordinator_address: str | None,
            process_count: int,
            process_index: int,
            **flags: Any,
        ) -> None:
            start_devices(simulate_devices, coordinator_address, process_count, process_index)
            command(**flags)

        decorated: Command = run
        for name in reversed((*names, *DEVICE_FLAGS)):
            decorated = FLAGS[name](decorated)
        return decorated

    return decorate


FLAGS: dict[str, Callable[[Command], Command]] = {
    "gin_file": click.option(
        "--gin_file", multiple=True, metavar="FILE", help="Settings; repeat it, later wins."
    ),
    "gin_param": click.option(
        "--gin_param",
        multiple=True,
        metavar="'NAME=VALUE'",
        help="One setting, as in 'Run.steps=100'; wins over files.",
    ),
    "model_dir": click.option(
        "--model_dir", required=True, type=click.Path(path_type=Path), help="The run's directory."
    ),
    "data_dir": click.option(
        "--data_dir",
        default=DATA_DIR,
        show_default=True,
        type=click.Path(path_type=Path),
        help="Where tokenised tasks are cached.",
    ),
    "checkpoint": click.option(
        "--checkpoint",
        default="latest",
        show_default=True,
        metavar="latest|best|all|STEP,…",
        help="Which weights.",
    ),
    "average": click.option(
        "--average", type=click.IntRange(1), metavar="N", help="Mean of the last N checkpoints."
    ),
    "input": click.option("--input", required=True, metavar="FILE", help="- for standard input."),
    "output": click.option(
        "--output", default="-", metavar="FILE", help="- for standard output, the default."
    ),
    "json": click.option("--json", "json_file", metavar="FILE", help="Write the result as JSON."),
    "batch_sequences": click.option(
        "--batch_sequences", type=click.IntRange(1), help="Rows at a time; the run's where absent."
    ),
    "beam": click.option("--beam", type=click.IntRange(1), metavar="N", help="Hypotheses a line."),
    "alpha": click.option(
        "--alpha", default=0.6, show_default=True, help="Exponent of the length penalty."
    ),
    "length_penalty": click.option(
        "--length_penalty",
        default="gnmt",
        show_default=True,
        type=click.Choice(["gnmt", "power"]),
        help="Of n tokens: ((5 + n) / 6)^alpha, or n^alpha.",
    ),
    "flat": click.option(
        "--flat/--apart",
        default=True,
        show_default=True,
        help="All hypotheses of a line in one cache, or each in its own; the same results.",
    ),
    "temperature": click.option(
        "--temperature", type=click.FloatRange(0), help="Draw at this temperature; 0 is greedy."
    ),
    "top_k": click.option(
        "--top_k", type=click.IntRange(1), help="Draw from the k likeliest tokens."
    ),
    "top_p": click.option(
        "--top_p", type=click.FloatRange(0, 1), help="Draw from the likeliest p of the mass."
    ),
    "samples": click.option(
        "--samples", type=click.IntRange(1), metavar="N", help="Draw N texts a line."
    ),
    "consensus": click.option(
        "--consensus", is_flag=True, help="Take the sample that is most like all (MBR by chrF)."
    ),
    "seed": click.option("--seed", default=0, show_default=True, help="Of the random choices."),
    "max_tokens": click.option(
        "--max_tokens",
        type=click.IntRange(1),
        help="Most new tokens; else half a row, or of a translation what the next two say.",
    ),
    "min_tokens": click.option(
        "--min_tokens", default=0, type=click.IntRange(0), help="Fewest new tokens."
    ),
    "length_factor": click.option(
        "--length_factor", default=1.5, show_default=True, help="New tokens a source token, ..."
    ),
    "length_extra": click.option(
        "--length_extra", default=10, show_default=True, help="... and these."
    ),
    "prefix": click.option("--prefix", metavar="TEXT", help="What each translation begins with."),
    "tag": click.option("--tag", help="Language tag, where the task has several."),
    "references": click.option(
        "--references", multiple=True, metavar="FILE", help="Line by line; repeat it for several."
    ),
    "test_set": click.option(
        "--test_set", metavar="NAME", help="By sacrebleu's name, such as wmt14/full, in its cache."
    ),
    "languages": click.option(
        "--languages", metavar="SRC-TGT", help="Of the test set, such as en-de."
    ),
    "tokenize": click.option(
        "--tokenize", metavar="NAME", help="sacrebleu's tokenizer for BLEU, such as 13a or intl."
    ),
    "resamples": click.option(
        "--resamples",
        default=1000,
        show_default=True,
        type=click.IntRange(0),
        help="Of the bootstrap; 0 gives no intervals.",
    ),
    "ter": click.option(
        "--ter/--no_ter", default=True, show_default=True, help="TER is the slow one."
    ),
    "simulate_devices": click.option(
        "--simulate_devices", type=click.IntRange(1), metavar="N", help="N virtual CPU devices."
    ),
    "coordinator_address": click.option(
        "--coordinator_address", metavar="HOST:PORT", help="Address of process 0 of several."
    ),
    "process_count": click.option(
        "--process_count", default=1, type=click.IntRange(1), help="Processes of this run."
    ),
    "process_index": click.option(
        "--process_index", default=0, type=click.IntRange(0), help="Which of them this is."
    ),
}
DEVICE_FLAGS = ("simulate_devices", "coordinator_address", "process_count", "process_index")


def start_devices(
    simulated: int | None = None,
    address: str | None = None,
    process_count: int = 1,
    process_index: int = 0,
) -> None:
    """Sets up devices and processes, before anything uses them."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    from layouts import mesh

    mesh.cache_compilations()
    if simulated is not None:
        mesh.simulate_devices(simulated)
    if process_count > 1:
        if address is None:
            raise UserError("--process_count without --coordinator_address.  Give HOST:PORT.")
        mesh.join_processes(address, process_count, process_index)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
def cli() -> None:
    """Trains, evaluates and decodes Transformers from gin files, under any layout."""


@cli.command()
@options("model_dir", "data_dir", "gin_file", "gin_param")
def train(model_dir: Path, data_dir: Path, **settings: tuple[str, ...]) -> None:
    """Train a model, or continue where it stopped."""
    from scripts.commands.train import train

    train(model_dir, data_dir, **settings)


@cli.command()
@options("data_dir", "gin_file", "gin_param")
@click.option("--rebuild", is_flag=True, help="Replace a cache that was built with other settings.")
def prepare(data_dir: Path, rebuild: bool, **settings: tuple[str, ...]) -> None:
    """Train the tokeniser, tokenise and pack a task, without training a model."""
    from scripts.commands import common as commands

    commands.prepare_task(data_dir, rebuild, **settings)


@cli.command()
@options(
    "model_dir", "data_dir", "gin_file", "gin_param", "checkpoint", "average", "json",
    "batch_sequences", "beam", "alpha", "length_penalty", "tag", "references", "test_set",
    "languages", "tokenize", "resamples", "ter",
)  # fmt: skip
@click.option("--split", default="validation", show_default=True, help="Which part of the task.")
@click.option("--input", "text_file", metavar="FILE", help="Evaluate this text instead.")
@click.option("--logit_scale", default=1.0, show_default=True, help="Multiplies every logit.")
@click.option(
    "--sentences", type=click.IntRange(0), metavar="N",
    help="Translate only so many, evenly spread; 0 measures the loss alone.",
)  # fmt: skip
@click.option("--hypotheses", metavar="FILE", help="Write the translations there.")
def evaluate(**flags: Any) -> None:
    """Loss and perplexities, per token, per counted word and per byte; of translations, BLEU.

    BLEU, chrF and TER are sacrebleu's, on raw text, with signatures and bootstrap intervals.
    """
    from scripts.commands import evaluate as evaluating

    evaluating.evaluate_model(**flags)


@cli.command()
@options(
    "model_dir", "gin_file", "gin_param", "checkpoint", "average", "input", "output",
    "batch_sequences", "beam", "alpha", "length_penalty", "flat", "temperature", "top_k", "top_p",
    "samples", "consensus", "seed", "max_tokens", "min_tokens", "length_factor", "length_extra",
    "prefix", "tag",
)  # fmt: skip
@click.option("--nbest", type=click.IntRange(1), metavar="N", help="The N best texts of each line.")
@click.option(
    "--format", default="text", show_default=True, type=click.Choice(["text", "tsv", "jsonl"]),
    help="Texts alone; or line, rank, score, log-probability, text; or JSON objects.",
)  # fmt: skip
def decode(**flags: Any) -> None:
    """Translate sources, or continue prompts, one a line.

    A translation is by beam search of 4, a continuation greedy, unless --beam, --temperature or
    --samples says otherwise.  Several checkpoints with commas decode together as an ensemble.  A
    decoding that was broken off goes on where it stopped when it is called again.
    """
    from scripts.commands import decode as decoding

    decoding.decode_file(**flags)


@cli.command()
@options(
    "model_dir", "gin_file", "gin_param", "checkpoint", "average", "input", "output",
    "batch_sequences", "tag",
)  # fmt: skip
def score(**flags: Any) -> None:
    """Log-likelihood, words and tokens of each line, tab-separated.

    A line for a translation model is a source, a tab and the target that is scored.
    """
    from scripts.commands import decode as decoding

    decoding.score_file(**flags)


@cli.command()
@options(
    "model_dir", "gin_file", "gin_param", "checkpoint", "average", "input", "output",
    "batch_sequences", "alpha", "tag",
)  # fmt: skip
@click.option("--weight", default=1.0, show_default=True, help="Of this model's log-likelihood.")
def rescore(**flags: Any) -> None:
    """Rank an n-best list (decode --format=jsonl) again, with the say of another model."""
    from scripts.commands import decode as decoding

    decoding.rescore_file(**flags)


@cli.command()
@click.option(
    "--system", multiple=True, required=True, metavar="FILE",
    help="Translations, one a line; the first is the baseline.",
)  # fmt: skip
@click.option("--lowercase", is_flag=True, help="Ignore case in BLEU and chrF.")
@options("references", "test_set", "languages", "tokenize", "resamples", "ter", "json")
def compare(**flags: Any) -> None:
    """Measure translations by BLEU, chrF and TER; several against the first.

    Differences come with p-values by paired bootstrap resampling.
    """
    from scripts.commands import compare as comparison

    comparison.compare(**flags)


@cli.group("import")
def import_() -> None:
    """Make a model directory of a model that another library trained."""


@import_.command("t5")
@options("model_dir", "gin_file", "gin_param")
@click.option(
    "--input", required=True, type=click.Path(path_type=Path), metavar="DIR",
    help="config.json, model.safetensors and spiece.model, as Hugging Face writes them.",
)  # fmt: skip
def import_t5(**flags: Any) -> None:
    """A T5 of Hugging Face's; the settings choose its task and how to train it on."""
    from scripts.commands import t5

    t5.import_t5(**flags)


@cli.group()
def export() -> None:
    """Write a model for another library."""


@export.command("t5")
@options("model_dir", "gin_file", "gin_param", "checkpoint", "average")
@click.option(
    "--output", required=True, type=click.Path(path_type=Path), metavar="DIR",
    help="A new folder, for Hugging Face to read.",
)  # fmt: skip
def export_t5(**flags: Any) -> None:
    """As a T5 of Hugging Face's."""
    from scripts.commands import t5

    t5.export_t5(**flags)


@cli.command()
@click.option(
    "--baseline", required=True, metavar="FILE",
    help="What `meshloom evaluate --json=FILE` wrote of a model on the parts of a mixture.",
)  # fmt: skip
@click.option(
    "--evaluation", multiple=True, required=True, metavar="FILE",
    help="The same of a model to hold against it; repeatable.",
)  # fmt: skip
@click.option("--output", required=True, metavar="FILE", help="The picture, such as gains.png.")
@options("json")
def gains(**flags: Any) -> None:
    """Draw what models gain in BLEU over a baseline, by language, against data size."""
    from scripts.commands.gains import gains

    gains(**flags)


# What a plan of decoding is asked for; names as `decode` has them, but for the lengths of texts.
DECODE_FLAGS = ("batch_sequences", "beam", "flat", "temperature", "top_k", "top_p", "samples",
                "max_tokens", "source_tokens", "prompt_tokens")  # fmt: skip


@cli.command()
@options(
    "gin_file", "gin_param", "json", "batch_sequences", "beam", "flat", "temperature", "top_k",
    "top_p", "samples", "max_tokens",
)  # fmt: skip
@click.option("--decode", is_flag=True, help="Plan decoding, not training, by decode's own flags.")
@click.option(
    "--source_tokens", type=click.IntRange(1), metavar="N",
    help="Of a translation's source; a row's where absent.",
)  # fmt: skip
@click.option(
    "--prompt_tokens", type=click.IntRange(0), metavar="N",
    help="What each text begins with; half a row where absent, of a translation none.",
)  # fmt: skip
@click.option("--html", metavar="FILE", help="Write the result as one page with charts.")
@click.option("--topology", metavar="KIND:SIZES", help="Absent TPUs, such as v3:32x32.")
@click.option(
    "--analytic", is_flag=True, help="In seconds, from the layout alone; compile nothing."
)
@click.option("--compare", is_flag=True, help="Plan under each of these layout files.")
@click.argument("layouts", nargs=-1, metavar="[LAYOUT]...")
def plan(
    decode: bool, compare: bool, layouts: tuple[str, ...], html: str | None, **flags: Any
) -> None:
    """What a run will cost: memory, FLOPs, traffic and time of its real training step.

    With --topology the step is compiled for TPUs that are not there (needs libtpu); without it,
    for the devices of this machine, of which --simulate_devices makes any number.  With --decode:
    memory, cache, and time of a token and of a whole output, for a batch of --batch_sequences.
    """
    from scripts.commands import layouts as searching
    from scripts.commands import plan as planning
    from scripts.commands import plan_decode as planning_decode

    decoding = {name: flags.pop(name) for name in DECODE_FLAGS}
    if decode:
        if compare or layouts:
            raise UserError("--decode plans one layout: no --compare.")
        planning_decode.plan_decoding(html=html, **decoding, **flags)
        return
    source = click.get_current_context().get_parameter_source
    given = [name for name in DECODE_FLAGS if source(name) is ParameterSource.COMMANDLINE]
    if given:
        raise UserError(f"--{given[0]} is about decoding.  Give --decode as well.")
    if compare != bool(layouts):
        raise UserError("--compare and layout files go together: --compare a.gin b.gin")
    if compare and html is not None:
        raise UserError("--html is the page of one plan.  Leave --compare out, or take --json.")
    if compare:
        searching.compare(layouts, **flags)
    else:
        planning.plan_run(html=html, **flags)


@cli.command("layouts")
@options("gin_file", "gin_param", "json")
@click.option("--topology", metavar="KIND:SIZES", help="Absent TPUs, such as v3:32x32.")
@click.option(
    "--search", "verify", is_flag=True,
    help="Compile the best three (needs libtpu); without --topology, run them.",
)  # fmt: skip
@click.option("--output", metavar="FILE", help="Write the best as a layout file.")
def layouts_(**flags: Any) -> None:
    """Rank the layouts that a model can have on a slice, the fastest that fits first.

    Without --topology, on the devices of this machine, whose speed is measured first.
    """
    from scripts.commands import layouts as searching

    searching.search(**flags)


@cli.command("report")
@options("model_dir")
def report(model_dir: Path) -> None:
    """Draw a run's curves and the load of its experts, as pictures and one page."""
    from scripts.commands.report import report

    report(model_dir)


@cli.group()
def inspect() -> None:
    """Show settings, data, parameters, a checkpoint or a layout."""


@inspect.command("config")
@options("gin_file", "gin_param", "json")
@click.option("--model_dir", type=click.Path(path_type=Path), help="A run's saved settings.")
def inspect_config(**flags: Any) -> None:
    """What each setting is, and which file set it."""
    from scripts.commands import inspect as inspections

    inspections.config(**flags)


@inspect.command("data")
@options("data_dir", "gin_file", "gin_param", "json")
@click.option("--model_dir", type=click.Path(path_type=Path), help="A run's saved settings.")
@click.option("--split", default="train", show_default=True)
@click.option("--rows", default="0", show_default=True, metavar="ID,ID…", help="Packed rows.")
@click.option("--step", type=click.IntRange(1), help="The rows of this training step instead.")
def inspect_data(**flags: Any) -> None:
    """Packed rows as a model sees them, decoded."""
    from scripts.commands import inspect as inspections

    inspections.data(**flags)


@inspect.command("params")
@options("gin_file", "gin_param", "json")
@click.option("--model_dir", type=click.Path(path_type=Path), help="A run's saved settings.")
def inspect_params(**flags: Any) -> None:
    """Every weight: path, letters, shape, placement, bytes per device; allocates nothing."""
    from scripts.commands import inspect as inspections

    inspections.params(**flags)


@inspect.command("checkpoint")
@options("model_dir", "checkpoint", "json")
def inspect_checkpoint(**flags: Any) -> None:
    """What a checkpoint holds, without loading it."""
    from scripts.commands import inspect as inspections

    inspections.checkpoint(**flags)


@inspect.command("layout")
@options("gin_file", "gin_param", "json")
@click.option("--model_dir", type=click.Path(path_type=Path), help="A run's saved settings.")
def inspect_layout(**flags: Any) -> None:
    """Problems of a layout with a model, and where each kind of tensor lives."""
    from scripts.commands import inspect as inspections

    inspections.layout(**flags)


@inspect.command("settings")
@options("json")
@click.argument("name", required=False)
def inspect_settings(**flags: Any) -> None:
    """Every setting that gin files can bind, or those of NAME, such as Run or Run.steps."""
    from scripts.commands.inspect_settings import inspect_settings

    inspect_settings(**flags)


def exits(call: Callable[[], object]) -> NoReturn:
    """Calls and exits: 0 when all went well, 2 for bad usage or input, 1 for a failed run."""
    try:
        call()
    except (click.exceptions.Abort, KeyboardInterrupt):
        sys.exit(130)
    except click.ClickException as error:
        error.show()
        sys.exit(2)
    except (UserError, RunError) as error:
        click.echo(f"meshloom: {error}", err=True)
        sys.exit(2 if isinstance(error, UserError) else 1)
    sys.exit(0)


def main() -> None:
    exits(lambda: cli.main(standalone_mode=False))


if __name__ == "__main__":
    main()
