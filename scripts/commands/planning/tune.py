"""Runs `meshloom tune`: writes the settings under which a run's step is the fastest."""

import dataclasses
import hashlib
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from configs.errors import UserError
from configs.imports import CHECKOUT
from configs.load import load
from configs.paths import local_path
from configs.write import dump, shown
from layouts.absent_devices import has_compiler
from layouts.candidates import as_gin
from layouts.cost.calibration import HostRates, measure_host
from layouts.cost.collectives import size_text
from layouts.cost.interconnect import Topology
from layouts.layout import Layout
from layouts.mesh import mesh_sizes
from scripts.commands.common import open_output, settings_of
from scripts.commands.doctor.machine import installed
from scripts.commands.planning.flags import TuneFlags
from scripts.commands.planning.inputs import no_compiler, parse_topology
from scripts.commands.planning.layouts import configured_layouts
from scripts.commands.planning.sweep import remat_text
from scripts.terminal import print_note, print_table
from trainer.checks import check_run
from trainer.planning.child import in_child
from trainer.planning.search import Hardware, StepBenchmark, one_line, rank_layouts, shortlist
from trainer.planning.training import plan_compiled
from trainer.planning.tune import Candidate, Trial, TrialLog, Tuner, ladders_of
from trainer.run import Run

Options = tuple[str, ...]
LOG = ".jsonl"  # suffix
COLUMNS = ("layout", "microbatches", "remat", "compiler options")
BURSTS = 3  # of steps, on this machine; the fastest counts
SHOWN = 10  # candidates in the terminal, and in the comments of the file
SECONDS = {"s": 1, "m": 60, "h": 3600}


def tune(flags: TuneFlags) -> None:
    """Searches layout, microbatches, recomputation and compiler options of a run."""
    config, budget_s = settings_of(flags.settings), parse_duration(flags.budget)
    run, topology = config.make(Run), parse_topology(flags.topology)
    if topology is not None and topology.count > 1 and not topology.is_gpu:
        raise UserError(
            f"--topology={topology.name}: one slice is tuned at a time.  Tune one slice, and plan "
            "several by `meshloom plan --analytic` with Layout.slices."
        )
    check_run(run)
    if topology is not None and not has_compiler(topology.chip.platform):
        raise UserError(f"`meshloom tune` compiles.  {no_compiler(topology.chip.platform)}")
    output = local_path(flags.output, "--output")
    if output.suffix == LOG:
        raise UserError(f"--output={output}: the log has this name.  Give one that ends in .gin.")
    configured = configured_layouts(config, run, topology)
    log = TrialLog(output.with_suffix(LOG), subject(run, topology, configured, flags.best))
    deadline_s = time.monotonic() + budget_s
    hardware: Hardware = topology or HostRates(
        **log.once("host", lambda: measure_host(jax.devices())._asdict())
    )

    def chosen_layouts() -> list[dict[str, Any]]:
        ranking = shortlist(rank_layouts(run, hardware, configured), configured, flags.best)
        return [dataclasses.asdict(ranked.layout) for ranked in ranking]

    layouts = [Layout(**fields) for fields in log.once("layouts", chosen_layouts)]
    tuner = Tuner(hardware, measure_on(topology), log, deadline_s)
    option_names = named_options(run, topology)
    tuner.search(list(ladders_of(run, layouts, list(option_names), hardware)))
    if not tuner.ranking:
        remedy = "Choose more devices, or a smaller Run.batch_sequences."
        if tuner.left:
            remedy = f"--budget={flags.budget} ended: the same command resumes."
        raise UserError(f"none of {len(tuner.trials)} trials fits.  {remedy}")
    report(tuner, option_names, flags)


def report(tuner: Tuner, option_names: Mapping[Options, str], flags: TuneFlags) -> None:
    """Prints what fits, the fastest first; writes the best settings."""
    ranking = tuner.ranking
    rows = [[*columns(candidate, option_names), *figures_of(trial)] for candidate, trial in ranking]
    print_table([*COLUMNS, "step", "bytes per device"], rows[:SHOWN])
    (best, trial), *others = ranking
    by = "steps on this machine" if flags.topology is None else f"the compiler for {flags.topology}"
    counted = f"The fastest of {len(ranking)} settings that fit, of {len(tuner.trials)}, by {by}:"
    print(f"{counted} {trial.step_s:.4g} s per step")
    comments = [
        counted,
        "{} per step, {} per device.  Next:".format(*figures_of(trial)),
        *(
            f"{(other.step_s or 0) / (trial.step_s or 1) - 1:+.1%}: "
            + ", ".join(map(" ".join, zip(COLUMNS, columns(c, option_names), strict=True)))
            for c, other in others[:SHOWN]
        ),
    ]
    lines = [
        f"{name} = {shown(value)}\n"
        for name, value in best.settings.items()
        if not name.startswith("Layout.")
    ]
    with open_output(flags.output) as file:
        file.write(as_gin(best.layout, comments) + "".join(lines))
    print_note(f"Wrote {flags.output}: give it to `meshloom train` after the run's --gin_file.")
    if tuner.left:
        print_note(
            f"--budget={flags.budget} left out {len(tuner.left)} settings that may be faster.  "
            "The same command resumes with them."
        )


def columns(candidate: Candidate, option_names: Mapping[Options, str]) -> list[str]:
    """Writes the settings of a candidate as `COLUMNS`."""
    settings = {
        name: ", ".join(value) if isinstance(value, tuple) else value
        for name, value in candidate.settings.items()
    }
    return [
        one_line(candidate.layout),
        f"{candidate.run.microbatches}",
        remat_text(settings),
        option_names[candidate.run.compiler_options],
    ]


def figures_of(trial: Trial) -> list[str]:
    """Writes what a candidate costs."""
    size = "unknown" if trial.needed_bytes is None else size_text(trial.needed_bytes)
    return [f"{trial.step_s:.4g} s", size]


def measure_on(topology: Topology | None) -> Callable[[Candidate], Trial]:
    """Returns what compiles a candidate for absent devices, or times its steps on this machine."""

    def compiled(candidate: Candidate) -> Trial:
        assert topology is not None
        sizes = mesh_sizes(candidate.layout.mesh, topology.devices)
        return Trial.of(in_child(plan_compiled, *candidate, sizes, topology))

    def timed(candidate: Candidate) -> Trial:
        benchmark = StepBenchmark(candidate.run, candidate.layout)
        return Trial(min(benchmark.time_step() for _ in range(BURSTS)))

    return timed if topology is None else compiled


def named_options(run: Run, topology: Topology | None) -> dict[Options, str]:
    """Names the compiler options of a run, if any, those shipped for the chips, and none, last."""
    named: dict[Options, str] = {run.compiler_options: "the run's"} if run.compiler_options else {}
    if topology is not None:
        kind = "gpu" if topology.is_gpu else topology.kind
        for file in sorted((CHECKOUT / "configs" / "compilers").glob(f"{kind}*.gin")):
            named[load([str(file)]).value("Run.compiler_options")] = file.name
    return named | {(): "none"}


def subject(
    run: Run, topology: Topology | None, configured: Sequence[Layout], best: int
) -> dict[str, Any]:
    """Describes what all trials of a search have in common."""
    packages = ("meshloom", "jax", "jaxlib", "libtpu", "jax-cuda13-pjrt")
    return {
        "run": hashlib.sha256(dump([run]).encode()).hexdigest(),
        "layouts": [*map(one_line, configured), f"best {best}"],
        "devices": len(jax.devices()) if topology is None else topology.name,
        "versions": {name: installed(name) for name in packages},
    }


def parse_duration(text: str) -> float:
    """Reads a duration in seconds.

    >>> parse_duration("1.5h")
    5400.0
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", text)
    if match is None:
        raise UserError(f"--budget={text}: legal: a number and s, m or h, such as 30m.")
    return float(match[1]) * SECONDS[match[2]]
