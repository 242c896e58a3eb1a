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
from configs.load import Config, load
from configs.paths import local_path
from configs.write import dump, shown
from layouts.absent_devices import has_compiler
from layouts.cost.calibration import HostRates, measure_host
from layouts.cost.collectives import format_mesh, size_text
from layouts.cost.interconnect import Topology
from layouts.layout import Layout
from layouts.mesh import mesh_sizes
from scripts.commands.common import open_output, settings_of, write_json
from scripts.commands.doctor.machine import installed
from scripts.commands.planning import inputs, page
from scripts.commands.planning.flags import TuneFlags
from scripts.flag import given_flags
from scripts.terminal import print_note, print_table
from trainer.checks import check_layout, check_run
from trainer.planning.child import in_child
from trainer.planning.report import as_json
from trainer.planning.search import one_line, rank_layouts, shortlist, suggest_slice, time_step
from trainer.planning.training import plan_compiled
from trainer.planning.tune import Candidate, Trial, TrialLog, Tuner, ladders_of
from trainer.run import Run

Layouts = Sequence[Layout]
Options = tuple[str, ...]
OptionNames = Mapping[Options, str]
Ranking = Sequence[tuple[Candidate, Trial]]
LOG = ".jsonl"  # suffix
COLUMNS = ("layout", "microbatches", "remat", "compiler options")
SHOWN = 10  # candidates printed, and listed in the comments of the file
SECONDS = {"s": 1, "m": 60, "h": 3600}


def tune(flags: TuneFlags) -> None:
    """Searches the layout, microbatches, recomputation and compiler options of a run."""
    config, budget_s = settings_of(flags.settings), parse_duration(flags.budget)
    run, topology = config.make(Run), inputs.parse_topology(flags)
    stages = [*run.by_stage[:-1], run := inputs.with_largest_batch(run)]
    check_flags(flags, topology, compiles=budget_s > 0)
    check_run(run)
    configured = configured_layouts(config, run, topology)
    work = search if budget_s else rank
    work(flags, stages, topology, configured)


def check_flags(flags: TuneFlags, topology: Topology | None, *, compiles: bool) -> None:
    """Refuses what this machine cannot search, and flags that do not go together."""
    if topology is not None and topology.count > 1 and not (topology.is_gpu and compiles):
        raise UserError(
            f"--topology={topology.name}: one slice is tuned at a time.  Tune one slice, and plan "
            "several with `meshloom plan --analytic` and Layout.slices."
        )
    if topology is not None and compiles and not has_compiler(topology.chip.platform):
        missing = inputs.no_compiler(topology.chip.platform)
        raise UserError(f"`meshloom tune` compiles, unless --budget=0.  {missing}")
    if not compiles and "--best" in given_flags(flags):
        raise UserError("--best chooses layouts to compile.  Remove it, or --budget=0.")
    if compiles and flags.json_file is not None:
        raise UserError("--json lists the plans of --budget=0.  Trials are in the log of --output.")
    if local_path(flags.output, "--output").suffix == LOG:
        raise UserError(f"--output={flags.output}: the log has this name.  Give a .gin file.")


def rank(
    flags: TuneFlags, stages: Sequence[Run], topology: Topology | None, configured: Layouts
) -> None:
    """Ranks all layouts by their traces, with the other settings of the run."""
    run = stages[-1]
    ranking = rank_layouts(stages, topology or measure_host(jax.devices()), configured)
    where = f"{len(jax.devices())} devices of one machine" if topology is None else topology.name
    basis = f"{len(ranking)} layouts on {where}, by their traces"
    fitting = [plan for plan in ranking if plan.fits is not False]
    if topology is not None and not fitting:
        least = min(ranking, key=lambda plan: plan.memory.needed_bytes)
        raise UserError(
            f"--topology={topology.name}: none of {basis}, fits; the least needs "
            f"{size_text(least.memory.needed_bytes)} per device of "
            f"{size_text(topology.chip.memory_bytes)}.  {suggest_slice(least, least.run)}  Traces "
            "are estimates; with a --budget, tune compiles."
        )
    figures = {one_line(plan.layout): as_json(plan) for plan in ranking}
    page.print_comparison(figures)
    write_json(flags.json_file, [{"layout": name, **plan} for name, plan in figures.items()])
    trials = [(Candidate(run, plan.layout), Trial.of(plan)) for plan in fitting]
    write_best(flags.output, trials, f"The fastest of {basis}", named_options(run, topology))


def search(
    flags: TuneFlags, stages: Sequence[Run], topology: Topology | None, configured: Layouts
) -> None:
    """Measures candidates, fastest predictions first, until none may be faster or time is up."""
    run = stages[-1]
    deadline_s = time.monotonic() + parse_duration(flags.budget)
    log_file = local_path(flags.output, "--output").with_suffix(LOG)
    log = TrialLog(log_file, subject(run, topology, configured, flags.best))
    rates = {} if topology else log.once("host", lambda: measure_host(jax.devices())._asdict())
    hardware = topology or HostRates(**rates)

    def chosen_layouts() -> list[dict[str, Any]]:
        ranking = shortlist(rank_layouts(stages, hardware, configured), configured, flags.best)
        return [dataclasses.asdict(plan.layout) for plan in ranking]

    layouts = [Layout(**fields) for fields in log.once("layouts", chosen_layouts)]
    tuner = Tuner(hardware, measure_on(topology), log, deadline_s)
    option_names = named_options(run, topology)
    tuner.search(list(ladders_of(stages, layouts, list(option_names), hardware)))
    if not (ranking := tuner.ranking):
        remedy = "Choose more devices, or a smaller Run.batch_sequences."
        if tuner.left:
            remedy = f"--budget={flags.budget} ended: the same command resumes."
        raise UserError(f"none of {len(tuner.trials)} trials fits.  {remedy}")
    rows = [[*columns(candidate, option_names), *figures_of(trial)] for candidate, trial in ranking]
    print_table([*COLUMNS, "step", "bytes per device"], rows[:SHOWN])
    by = "steps on this machine" if topology is None else f"the compiler for {topology.name}"
    counted = f"The fastest of {len(ranking)} settings that fit, of {len(tuner.trials)}, by {by}"
    write_best(flags.output, ranking, counted, option_names)
    if tuner.left:
        print_note(
            f"--budget={flags.budget} left out {len(tuner.left)} settings that may be faster.  "
            "The same command resumes with them."
        )


def configured_layouts(config: Config, run: Run, topology: Topology | None) -> list[Layout]:
    """Returns the layout in the gin files, if there is one that is legal on these devices."""
    if not any(name.startswith("Layout.") for name in config.bound):
        return []
    layout = config.make(Layout)
    torus = None if topology is None else topology.torus
    try:
        sizes = inputs.sizes_on(layout, topology)
        check_layout(run, layout, sizes, config.origins, torus)
    except UserError as error:
        print_note(f"The layout of the gin files is left out: {error}")
        return []
    return [dataclasses.replace(layout, mesh=format_mesh(sizes))]


def write_best(file: str, ranking: Ranking, counted: str, option_names: OptionNames) -> None:
    """Prints the best settings of a ranking, and writes them as a gin file."""
    (best, trial), *others = ranking
    print(f"{counted}: {one_line(best.layout)}, {trial.step_s:.4g} s per step")
    comments = [
        f"{counted}:",
        "{} per step, {} per device.  Next:".format(*figures_of(trial)),
        *(
            f"{(other.step_s or 0) / (trial.step_s or 1) - 1:+.1%}: "
            + ", ".join(map(" ".join, zip(COLUMNS, columns(c, option_names), strict=True)))
            for c, other in others[:SHOWN]
        ),
    ]
    with open_output(file) as output:
        output.writelines(f"# {comment}\n" for comment in comments)
        output.writelines(f"{name} = {shown(value)}\n" for name, value in best.settings.items())
    print_note(f"Wrote {file}: give it to `meshloom train` after the run's --gin_file.")


def columns(candidate: Candidate, option_names: OptionNames) -> list[str]:
    """Writes the settings of a candidate in the columns of `COLUMNS`."""
    items = candidate.settings.items()
    settings = {name: ", ".join(x) if isinstance(x, tuple) else x for name, x in items}
    kept = {"saves": "Transformer.remat_saves", "on the host": "Transformer.remat_offloads"}
    saved = [f"{what} {settings[name]}" for what, name in kept.items() if settings.get(name)]
    return [
        one_line(candidate.layout),
        f"{candidate.run.microbatches}",
        ", ".join([settings.get("Transformer.remat", ""), *saved]),
        option_names[candidate.run.compiler_options],
    ]


def figures_of(trial: Trial) -> list[str]:
    """Writes the step time and the memory of a trial."""
    size = "unknown" if trial.needed_bytes is None else size_text(trial.needed_bytes)
    return [f"{trial.step_s:.4g} s", size]


def measure_on(topology: Topology | None) -> Callable[[Candidate], Trial]:
    """Returns a function that compiles a candidate for absent devices, or times its steps here."""

    def measure(candidate: Candidate) -> Trial:
        if topology is None:
            return Trial(time_step(*candidate))
        sizes = mesh_sizes(candidate.layout.mesh, topology.devices)
        return Trial.of(in_child(plan_compiled, *candidate, sizes, topology))

    return measure


def named_options(run: Run, topology: Topology | None) -> dict[Options, str]:
    """Names the compiler options to try: the run's, those shipped for the chips, and none."""
    named: dict[Options, str] = {run.compiler_options: "the run's"} if run.compiler_options else {}
    if topology is not None:
        kind = "gpu" if topology.is_gpu else topology.kind
        for file in sorted((CHECKOUT / "configs" / "compilers").glob(f"{kind}*.gin")):
            named[load([str(file)]).value("Run.compiler_options")] = file.name
    return named | {(): "none"}


def subject(run: Run, topology: Topology | None, configured: Layouts, best: int) -> dict[str, Any]:
    """Describes what all trials of a search share."""
    packages = ("meshloom", "jax", "jaxlib", "libtpu", "jax-cuda13-pjrt")
    return {
        "run": hashlib.sha256(dump([run]).encode()).hexdigest(),
        "layouts": [*map(one_line, configured), f"best {best}"],
        "devices": topology.name if topology else [device.device_kind for device in jax.devices()],
        "versions": {name: installed(name) for name in packages},
    }


def parse_duration(text: str) -> float:
    """Parses a duration into seconds."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", "0s" if text == "0" else text)
    if match is None:
        raise UserError(f"--budget={text}: legal: a number and s, m or h, such as 30m, or 0.")
    return float(match[1]) * SECONDS[match[2]]
