"""Reads what to plan, and makes the best plan that is possible on this machine."""

import contextlib
import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import jax

from configs.errors import UserError
from configs.load import Config
from layouts.absent_devices import COMPILERS, has_compiler
from layouts.cost.collectives import format_mesh
from layouts.cost.interconnect import Topology, check_offered
from layouts.layout import Layout
from layouts.mesh import make_mesh, mesh_sizes
from scripts.commands.common import settings_of, with_known_steps
from scripts.commands.planning.flags import PlanFlags, TuneFlags
from scripts.terminal import print_note
from trainer import checks
from trainer.checks import TraceFn, describe_layout, layout_name
from trainer.planning import training
from trainer.planning.child import CompilerAborted, in_child
from trainer.run import MAX_STEPS, Run
from trainer.traces import trace_train_step


class PlanInputs(NamedTuple):
    """Holds what to plan: a run under a layout, on a slice or on this machine's devices."""

    config: Config
    run: Run
    layout: Layout
    topology: Topology | None
    sizes: dict[str, int]
    """Sizes of the mesh axes."""

    @classmethod
    def read(cls, config: Config, topology: Topology | None) -> "PlanInputs":
        run, layout = config.make(Run), config.make(Layout)
        checks.check_run(run)
        return cls(config, run, layout, topology, sizes_on(layout, topology))

    def check(self, *stages: Run) -> None:
        """Raises every layout error of a run's stages; prints the warnings of the last stage."""
        torus, origins = None, self.config.origins
        if self.topology is not None and self.topology.count == 1:  # it has an order
            torus = self.topology.torus
        given = self.layout, self.sizes, origins, torus
        *_, warnings = (checks.check_layout(run, *given) for run in stages)
        print_note(*warnings)

    @property
    def stages(self) -> list[Run]:
        """Returns the run in each of its stages; the last one is planned."""
        return [*self.config.make(Run).by_stage[:-1], self.run]

    @contextlib.contextmanager
    def explained_errors(self, run: Run, trace_fn: TraceFn) -> Iterator[None]:
        """Turns an error of JAX, or an abort, that the layout causes into one message."""
        origins = self.config.origins
        try:
            with checks.explained_errors(run, self.layout, self.sizes, origins, trace_fn):
                yield
        except CompilerAborted as error:
            raise CompilerAborted(f"{describe_layout(self.layout, origins)}: {error}") from None

    @property
    def title(self) -> str:
        topology = "" if self.topology is None else f" on {self.topology.name}"
        return f"{layout_name(self.config.origins)} {format_mesh(self.sizes)}{topology}"


def read_inputs(flags: PlanFlags, *layout_files: str) -> PlanInputs:
    """Reads the inputs that the flags of a plan name, with a layout file if one is given."""
    files = (*flags.settings.gin_file, *layout_files)
    config = settings_of(dataclasses.replace(flags.settings, gin_file=files))
    inputs = PlanInputs.read(config, parse_topology(flags))
    run = inputs.run
    if flags.tokens is None:
        run = with_known_steps(run, flags.settings.model_dir, flags.data_dir)
    else:
        steps = run.batch_sizes.step_of(math.ceil(flags.tokens / run.task.length) - 1) + 1
        if steps > MAX_STEPS:
            raise UserError(
                f"--tokens={flags.tokens:g}: these are {steps:,} steps.  Legal: at most "
                f"{MAX_STEPS:,}, of {run.batch_sequences} rows here."
            )
        run = dataclasses.replace(run, steps=steps, epochs=None)
    return inputs._replace(run=with_largest_batch(run))


def with_largest_batch(run: Run) -> Run:
    """Returns the run with its largest batch in all steps; prints that it does so."""
    if not any(run.stages.values()):
        return run
    run = run.by_stage[-1]
    shape = f"{run.batch_sequences:,} rows of {run.task.length:,} tokens"
    print_note(f"Planned as if all batches had {shape}, as the largest.")
    return run


def named_layouts(files: Iterable[str]) -> dict[str, str]:
    """Returns layout files by the names of their plans, which are paths if file names are equal."""
    stems = {file: Path(file).stem for file in files}
    counts = Counter(stems.values())
    return {stem if counts[stem] == 1 else file: file for file, stem in stems.items()}


def parse_topology(flags: PlanFlags | TuneFlags) -> Topology | None:
    """Parses a TPU slice that Google Cloud offers, or GPU nodes."""
    if flags.topology is None:
        return None
    if flags.devices.simulate_devices is not None:
        raise UserError("--simulate_devices has no effect on --topology.  Remove one of them.")
    topology = Topology.named(flags.topology)
    check_offered(topology)
    return topology


def sizes_on(layout: Layout, topology: Topology | None) -> dict[str, int]:
    """Computes the mesh sizes that use all devices of a slice."""
    if topology is None:
        return mesh_sizes(layout.mesh, len(jax.devices()))
    sizes = mesh_sizes(layout.mesh, None)
    product = math.prod(size for size in sizes.values() if size != -1)
    if topology.devices % product if -1 in sizes.values() else product != topology.devices:
        raise UserError(
            f"Layout.mesh = {layout.mesh!r}: its sizes multiply to {product}, and "
            f"--topology={topology.name} has {topology.devices} devices ({topology.chips} chips "
            f"of {topology.chip.cores}).  "
            f"Legal: sizes that multiply to {topology.devices}, or -1 for one."
        )
    return mesh_sizes(layout.mesh, topology.devices)


def best_plan(inputs: PlanInputs, analytic: bool) -> training.StepPlan:
    """Makes the best plan that is possible on this machine, and prints what is missing in it."""
    _, run, layout, topology, sizes = inputs
    compiles = not analytic and can_compile(topology)
    with inputs.explained_errors(run, trace_train_step):
        if not compiles:
            return training.plan_from_trace(run, layout, sizes, topology)
        if topology is not None:
            return in_child(training.plan_compiled, run, layout, sizes, topology)
        step = training.trace_step(run, layout, make_mesh(layout))
        return training.plan_step(step, None, training.compile_step(step))


def can_compile(topology: Topology | None) -> bool:
    """Returns whether this machine can compile for a slice, or for itself; prints which."""
    if topology is None:
        return True
    if topology.count > 1 and not topology.is_gpu:
        raise UserError(
            f"--topology={topology.name}: several slices are planned from the trace alone.  "
            "Add --analytic."
        )
    if has_compiler(topology.chip.platform):
        devices = f"{topology.devices} devices of {topology.name}"
        print_note(f"Compiling for {devices}, which takes minutes.")
        return True
    print_note(no_compiler(topology.chip.platform))
    return False


def no_compiler(platform: str) -> str:
    """Describes what is missing without the compiler of a platform, and how to install it."""
    return (
        f"The compiler for {platform.upper()}s is not installed, so memory and time are estimated "
        "from the layout alone; memory and collectives of the compiled program are missing.  "
        f'Install it: pip install -e ".[{COMPILERS[platform][1]}]"'
    )
