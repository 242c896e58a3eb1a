"""Compares the numbers of two checkouts of Meshloom, bit for bit.

    python -m tests.compare_checkouts OLD NEW
    python -m tests.compare_checkouts OLD --record=FILE
    python -m tests.compare_checkouts FILE NEW

Shows that a refactoring moved no number.  Each checkout trains the same small models under the same
layouts, on text that is made here, and decodes with them; losses, norms of gradients and decoded
hypotheses with their scores must be equal to the last bit.  Only the command line of a checkout is
used, so that its modules may have any names.  Nothing is downloaded.  Numbers that were recorded
hold for one machine and one Python environment, and are refused elsewhere.

Ends with 0 where all is identical, with 1 where anything differs or failed, with 2 for bad usage.
"""

import concurrent.futures
import dataclasses
import hashlib
import importlib.metadata
import itertools
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import click

Numbers = dict[str, str]
"""Holds what one case gave, in order, as JSON in full precision, by names as "step 3 loss"."""
Cases = dict[str, Numbers]
"""Holds numbers by the layout that was trained under, or the search that decoded."""

STEPS = 10
DEVICES = 8
PROCESSES = 2
LIMIT_S = 600  # far beyond what a command takes: one that hangs fails
# Of the lines of metrics.jsonl and evaluations.jsonl; the rest is time, or follows from these.
COMPARED = ("loss", "grad_norm", "objective", "accuracy", "tokens", "learning_rate")
FAILURE = "failure"
NAME_WIDTH, CASE_WIDTH = 15, 25

SETTINGS = (
    "Run.model = @Transformer()", "Transformer.layers = 2", "Transformer.d_model = 32",
    "Transformer.d_ff = 64", "Transformer.heads = 8", "Transformer.d_kv = 8",
    "Transformer.vocab = 288", "Transformer.length = 32", "Transformer.dropout = 0.1",
    "SentencePiece.size = 288", f"Run.steps = {STEPS}", "Run.batch_sequences = 8",
    "Run.evaluate_batches = 2",
)  # fmt: skip
ADAMW = ("Run.optimizer = @AdamW()", "AdamW.schedule = @Constant()", "Constant.peak = 0.01")
ADAFACTOR = (
    "Run.optimizer = @Adafactor()", "Adafactor.schedule = @Constant()", "Constant.peak = 0.03",
    "Adafactor.factored_from = 8", "Adafactor.clip_global_norm = 0.5",
)  # fmt: skip
DENSE = (
    *ADAMW, "Mlp.activation = 'gelu'", "Transformer.positions = @Rotary()",
    "MultiHead.combined_qkv = True", "MultiHead.chunks = 2", "MultiHead.dropout = 0.1",
    "Run.batch_sequences = 16", "Run.microbatches = 2",
    "Run.label_smoothing = 0.1", "Run.z_loss = 0.001",
)  # fmt: skip
MOE = (
    "Moe.experts = 8", "Moe.router = @Top2()", "Top2.jitter = 0.1",
    "Top2.z_loss = 0.001", "Top2.capacity_factor = 0.75", "Top2.least_capacity = 1",
)  # fmt: skip
EXPERTS = (
    *ADAFACTOR, *MOE, "Transformer.layers = 1", "Transformer.feed_forward = @Moe()",
    "Transformer.positions = @Relative()", "Transformer.scan = False",
)  # fmt: skip
ENCODER_DECODER = (
    *ADAFACTOR, "Transformer.layers = 1", "Transformer.encoder_layers = 1",
    "Transformer.positions = @Sinusoidal()", "Mlp.gated = True", "Mlp.activation = 'silu'",
    "Transformer.tied = False", "Transformer.loss_chunks = 2", "Transformer.remat = 'full'",
)  # fmt: skip
# Nothing divides: batch and its microbatches, heads, vocabulary, experts.
PADDED = (
    *ADAMW, *MOE, "Transformer.pattern = (@Block(), @experts/Block())",
    "experts/Block.feed_forward = @Moe()", "Moe.experts = 6",
    "Transformer.heads = 6", "Transformer.kv_heads = 3", "Transformer.vocab = 291",
    "Run.batch_sequences = 10", "Run.microbatches = 2",
)  # fmt: skip

SEARCHES = {
    "decoded greedily": ("--temperature=0",),
    "decoded by beam search": ("--beam=4", "--nbest=4"),
    "decoded by sampling": ("--temperature=0.9", "--samples=3", "--nbest=3", "--seed=3"),
}


@dataclasses.dataclass(frozen=True)
class Split:
    """Names a layout file that every checkout has, or holds a layout in the place of one."""

    name: str
    mesh: str | None = None
    rules: str = ""
    param_rules: str = ""

    def flags(self) -> list[str]:
        """Returns the flags of a command that set the layout."""
        if self.mesh is None:
            return [f"--gin_file=layouts/{self.name}.gin"]
        values = {"mesh": self.mesh, "rules": self.rules, "param_rules": self.param_rules}
        settings = [f"--gin_param=Layout.{name} = '{value}'" for name, value in values.items()]
        return ["--gin_file=layouts/whole.gin", *settings]


@dataclasses.dataclass(frozen=True)
class ModelCase:
    """Holds a model with its run, and the layouts it trains under; it decodes under the first."""

    settings: tuple[str, ...]
    splits: tuple[Split, ...]
    translates: bool = False


@dataclasses.dataclass(frozen=True)
class Texts:
    """Names the files that all models train on and decode."""

    folder: Path

    def file(self, name: str) -> Path:
        return self.folder / f"{name}.txt"

    def task(self, translates: bool) -> list[str]:
        """Returns the settings that name the files."""
        if translates:
            kind, places = "Translation", ("source", "target")
            files = [f"ParallelFiles.train_{side} = '{self.file(side)}'" for side in places]
            sizes, source = ["Translation.source_length = 32"], "@ParallelFiles()"
        else:
            kind, files = "Task", [f"TextFiles.train = '{self.file('source')}'"]
            sizes, source = [], "@TextFiles()"
        names = (f"{kind}.name = 'made_up'", f"{kind}.length = 32", f"{kind}.source = {source}",
               f"{kind}.vocab = @SentencePiece()")  # fmt: skip
        return [f"Run.task = @{kind}()", *names, *sizes, *files]


@dataclasses.dataclass(frozen=True)
class Checkout:
    """Calls the command line of a checkout, for one model in a folder of its own."""

    root: Path
    folder: Path
    texts: Texts
    model: ModelCase

    def numbers(self) -> Cases:
        """Trains under each layout, then decodes by each search."""
        cases = {split.name: self._trained(split) for split in self.model.splits}
        return cases | {name: self._decoded(flags) for name, flags in SEARCHES.items()}

    def _trained(self, split: Split) -> Numbers:
        task = self.texts.task(self.model.translates)
        settings = [*SETTINGS, *task, *self.model.settings]
        model_dir = self.folder / split.name
        failure, _ = self._call(
            "train", f"--model_dir={model_dir}", f"--data_dir={self.folder / 'data'}",
            *split.flags(), *(f"--gin_param={setting}" for setting in settings),
        )  # fmt: skip
        return {FAILURE: failure} if failure else metrics(model_dir)

    def _decoded(self, search: Sequence[str]) -> Numbers:
        split = self.model.splits[0]
        failure, output = self._call(
            "decode", f"--model_dir={self.folder / split.name}", *split.flags(), *search,
            f"--input={self.texts.file('prompts')}", "--max_tokens=12", "--format=jsonl",
        )  # fmt: skip
        texts = {f"line {n}": line for n, line in enumerate(output.splitlines(), 1)}
        return {FAILURE: failure or "decode wrote nothing"} if failure or not texts else texts

    def _call(self, command: str, *flags: str) -> tuple[str, str]:
        """Runs a command; returns why it failed, empty where it did not, and its output."""
        arguments = [sys.executable, "-m", "scripts.meshloom", command, *flags]
        try:
            done = subprocess.run(
                [*arguments, f"--simulate_devices={DEVICES}"], cwd=self.root, text=True,
                env=self._environment(), capture_output=True, timeout=LIMIT_S,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return f"{command} took longer than {LIMIT_S} s", ""
        if done.returncode == 0:
            return "", done.stdout
        said = " ".join(done.stderr.split())
        return f"{command} ended with {done.returncode}: {said[-300:]}", done.stdout

    def _environment(self) -> dict[str, str]:
        """Leaves out what would change how programs are compiled, and any cache of other runs."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_"))}
        cache = str(self.folder / "compiled")
        return {**kept, "PYTHONPATH": str(self.root), "JAX_COMPILATION_CACHE_DIR": cache}


def files(*names: str) -> tuple[Split, ...]:
    """Returns the layouts of files, by their names."""
    return tuple(Split(name) for name in names)


# Layouts that split the batch are refused with dispatch="dropless", which has a single group of
# tokens, so it runs whole, model-parallel, and under two more layouts that keep the batch whole.
KEEPS_BATCH = (
    *files("whole", "model_parallel"),
    Split("d_ff and heads", "x:4,y:2", "d_ff:x;heads:y;vocab:y"),
    Split("experts stored apart", "x:4,y:2", "heads:y", "experts:x"),
)
PADS = (
    Split("experts with batch", "data:4,model:2",
          "batch:data+;heads:model+;vocab:model+;experts:data+"),
    Split("weights split twice", "data:2,model:4",
          "batch:data+;kv_heads:model+;vocab:model+;experts:model+", "d_model:data"),
    Split("batch alone", "data:8", "batch:data+"),
)  # fmt: skip
EXPERT_SPLITS = files("whole", "expert_parallel", "expert_and_model_parallel", "expert_mesh_axis")
MODELS = {
    "dense": ModelCase(DENSE, files("whole", "data_parallel", "data_and_model_parallel", "fsdp")),
    "gather": ModelCase((*EXPERTS, "Moe.dispatch = 'gather'"), EXPERT_SPLITS),
    "einsum": ModelCase((*EXPERTS, "Moe.dispatch = 'einsum'"), EXPERT_SPLITS),
    "dropless": ModelCase((*EXPERTS, "Moe.dispatch = 'dropless'"), KEEPS_BATCH),
    "encoder-decoder": ModelCase(
        ENCODER_DECODER, files("whole", "sequence_parallel", "two_dimensional", "fsdp"), True
    ),
    "padded": ModelCase(PADDED, PADS),
}


def write_texts(folder: Path) -> Texts:
    """Writes made-up sentences, always the same; a translation has the words turned round."""
    texts, rng = Texts(folder), random.Random(0)
    words = ["".join(parts) for parts in itertools.product(("ka", "lo", "mi"), ("ra", "st", "vo"))]
    source = [" ".join(rng.choices(words, k=rng.randint(3, 9))) for _ in range(600)]
    target = [" ".join(line.upper().split()[::-1]) for line in source]
    prompts = ["kara lost", "", "mivo kara lost mivo kara", "lora", "mist mira kavo"]
    for name, lines in {"source": source, "target": target, "prompts": prompts}.items():
        texts.file(name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return texts


def metrics(model_dir: Path) -> Numbers:
    """Reads what each step gave, and the validation at the end; a missing loss is a failure."""
    numbers: Numbers = {}
    for kind, name in (("step", "metrics.jsonl"), ("validation after step", "evaluations.jsonl")):
        file = model_dir / name
        for text in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
            line = json.loads(text)
            numbers |= {f"{kind} {line['step']} {name}": value for name, value in exact(line)}
    names = [f"step {step} {name}" for step in range(1, STEPS + 1) for name in COMPARED[:2]]
    lost = [name for name in names if name not in numbers]
    return {FAILURE: f"metrics.jsonl has no {lost[0]}"} if lost else numbers


def exact(line: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields the compared numbers of a line in full precision, then what its experts did."""
    yield from ((name, json.dumps(line[name])) for name in COMPARED if name in line)
    for layer, numbers in line.get("experts", {}).items():
        yield from ((f"{layer} {name}", json.dumps(value)) for name, value in numbers.items())


def about_here() -> dict[str, str]:
    """Describes what recorded numbers depend on, in addition to the checkout."""
    packages = ("jax", "jaxlib", "flax", "optax", "numpy", "sentencepiece")
    versions = {name: importlib.metadata.version(name) for name in packages}
    return {"python": platform.python_version(), "processor": processor(),
            "cores": str(os.cpu_count()), **versions}  # fmt: skip


def processor() -> str:
    """Names the processor and all that its instructions are said to be."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    described = dict.fromkeys(line for line in lines if line.startswith(("model name", "flags")))
    digest = hashlib.sha256("\n".join(described).encode()).hexdigest()[:8]
    name = next(
        (line.partition(": ")[2] for line in described if line.startswith("model")), "unknown"
    )
    return f"{name}, instructions {digest}"


class ComparedCheckout:
    """Reads the numbers of a checkout: runs it, or takes a record of its runs."""

    def __init__(self, path: Path):
        self.path = path
        self.recorded: dict[str, Cases] | None = None
        if path.is_file():
            self.recorded = read_record(path)
        elif not (path / "scripts" / "meshloom.py").is_file():
            refuse(f"{path}: neither a checkout of Meshloom nor a file that --record wrote.")

    def numbers(self, name: str, folder: Path, texts: Texts) -> Cases:
        """Runs a model in a new folder, or looks it up."""
        if self.recorded is not None:
            return self.recorded.get(name, {})
        folder.mkdir()
        return Checkout(self.path.resolve(), folder, texts, MODELS[name]).numbers()


def read_record(file: Path) -> dict[str, Cases]:
    """Reads what --record wrote, on this machine and in this Python environment."""
    try:
        recorded = json.loads(file.read_text(encoding="utf-8"))
        about, numbers = dict(recorded["about"]), dict(recorded["numbers"])
    except (ValueError, KeyError, TypeError):
        refuse(f"{file}: no file that --record wrote.")
    here = about_here()
    for name in [name for name in here if about.get(name) != here[name]][:1]:
        refuse(f"{file}: was recorded with {name} {about.get(name)}, here it is {here[name]}.")
    return numbers


def refuse(why: str) -> NoReturn:
    """Ends with one line and the code of bad usage."""
    click.echo(f"compare_checkouts: {why}", err=True)
    sys.exit(2)


def run_all(
    sides: Sequence[ComparedCheckout], names: Sequence[str], folder: Path
) -> Iterator[tuple[str, list[Cases]]]:
    """Yields each model with its numbers from every side; a few processes run at a time."""
    texts = write_texts(folder)
    with concurrent.futures.ThreadPoolExecutor(PROCESSES) as pool:
        waiting = {
            name: [
                pool.submit(side.numbers, name, folder / f"{name}_{index}", texts)
                for index, side in enumerate(sides)
            ]
            for name in names
        }
        try:
            for name, futures in waiting.items():
                yield name, [future.result() for future in futures]
        finally:
            pool.shutdown(cancel_futures=True)


def difference(old: Numbers | None, new: Numbers | None) -> str | None:
    """Describes the first difference of a case, and tells what failed or was never run.

    >>> difference({"step 1 loss": "5.5"}, {"step 1 loss": "5.25"})
    'step 1 loss: old 5.5, new 5.25'
    """
    for side, numbers in (("old", old), ("new", new)):
        if not numbers:
            return f"{side}: no numbers"
        if FAILURE in numbers:
            return f"{side}: {numbers[FAILURE]}"
    assert old is not None and new is not None
    for name in [*old, *(name for name in new if name not in old)]:
        pair = old.get(name, "nothing"), new.get(name, "nothing")
        if pair[0] != pair[1]:
            return f"{name}: old {pair[0]}, new {pair[1]}"
    return None


def compared(name: str, old: Cases, new: Cases) -> list[dict[str, str | None]]:
    """Compares, and prints, each case of a model."""
    model, cases = MODELS[name], []
    for case in [*(split.name for split in model.splits), *SEARCHES]:
        first = difference(old.get(case), new.get(case))
        print_case(name, case, first or "identical")
        cases.append({"model": name, "case": case, "difference": first})
    return cases


def print_case(name: str, case: str, what: str) -> None:
    """Prints the line of one case."""
    click.echo(f"{name:{NAME_WIDTH}} {case:{CASE_WIDTH}} {what}")


def compare(
    old: ComparedCheckout,
    new: ComparedCheckout,
    names: Sequence[str],
    folder: Path,
    json_file: Path | None,
) -> bool:
    """Compares two sides; tells whether all is identical."""
    cases = []
    for name, (old_cases, new_cases) in run_all([old, new], names, folder):
        cases += compared(name, old_cases, new_cases)
    different = sum(case["difference"] is not None for case in cases)
    click.echo(f"{len(cases)} cases, {different} different.")
    if json_file is not None:
        result = {"about": about_here(), "old": str(old.path), "new": str(new.path), "cases": cases}
        json_file.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return not different


def record(side: ComparedCheckout, names: Sequence[str], folder: Path, file: Path) -> bool:
    """Writes the numbers of one side, model by model; tells whether all runs went well."""
    numbers: dict[str, Cases] = {}
    result = {"about": about_here(), "checkout": str(side.path), "numbers": numbers}
    for name, (numbers[name],) in run_all([side], names, folder):
        for case, of_case in numbers[name].items():
            print_case(name, case, of_case.get(FAILURE) or f"{len(of_case)} numbers or texts")
        file.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return not any(FAILURE in of_case for cases in numbers.values() for of_case in cases.values())


@click.command()
@click.argument("old", type=click.Path(path_type=Path))
@click.argument("new", type=click.Path(path_type=Path), required=False)
@click.option(
    "--only", multiple=True, type=click.Choice(list(MODELS)), help="Which models; repeatable."
)
@click.option(
    "--json", "json_file", type=click.Path(path_type=Path), metavar="FILE",
    help="Write what was found as JSON.",
)  # fmt: skip
@click.option(
    "--record", "record_file", type=click.Path(path_type=Path), metavar="FILE",
    help="Write the numbers of OLD, in the place of a comparison.",
)  # fmt: skip
def main(
    old: Path,
    new: Path | None,
    only: tuple[str, ...],
    json_file: Path | None,
    record_file: Path | None,
) -> None:
    """Compares the numbers of two checkouts, or of files that --record wrote, bit for bit."""
    if (new is None) == (record_file is None):
        refuse("give a NEW checkout or --record=FILE, one of the two.")
    if record_file is not None and json_file is not None:
        refuse("--json needs a comparison.  Remove it, or --record.")
    sides = [ComparedCheckout(path) for path in (old, new) if path is not None]
    names = [name for name in MODELS if name in only or not only]
    with tempfile.TemporaryDirectory(prefix="compare_checkouts_") as temporary:
        folder = Path(temporary)
        if record_file is not None:
            good = record(sides[0], names, folder, record_file)
        else:
            good = compare(sides[0], sides[1], names, folder, json_file)
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
