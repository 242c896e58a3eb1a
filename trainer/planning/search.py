"""Lists the legal layouts of a run, and finds the fastest among those that fit."""

import dataclasses
import itertools
import logging
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence

import jax
import numpy as np

from configs.errors import RunError, UserError
from layouts.cost.calibration import HostRates
from layouts.cost.collectives import format_mesh
from layouts.cost.interconnect import Topology, offered_slices
from layouts.device_order import orders
from layouts.hlo.compilation import compile_program
from layouts.layout import Layout
from layouts.lint.recorder import Record
from layouts.lint.report import lint, table
from layouts.mesh import batch_shards, make_mesh, mesh_sizes
from trainer.checks import find_untraceable, record_loss
from trainer.feed import BatchSharding
from trainer.planning import training
from trainer.planning.counts import ProgramPlan
from trainer.planning.training import StepPlan
from trainer.run import Run
from trainer.step import init_state, train_step, train_step_spec
from trainer.traces import trace_train_step

logger = logging.getLogger(__name__)
BURST_S = 0.5  # far longer than another process keeps a core
BURSTS = 3
FIRST_TOKEN = 2  # smaller ids have a meaning
MODEL = "heads:model;d_ff:model;vocab:model"
IMAGES = "height:model+"
# Activations between the large products, over the model parallel devices: replicated, split by
# position, or by width (the Giant Models guide, section 2.3).
ACTIVATIONS = ("", "length:model?", "d_model:model?")
# Weights over the data parallel devices: replicated, split, or split unless experts use these.
WEIGHTS = ("", "d_model:{rows}", "d_model:{rows}?")
# Rules and parameter rules of well-known layouts.
DATA_PARALLEL = ("batch:data", "")
FSDP = ("batch:data", "d_model:data")
FSDP_AND_MODEL = (f"batch:data;{MODEL}", "d_model:data")
EXPERTS = "experts:{rows}"
EVERYWHERE = "experts:{rows};experts:model"  # then d_ff gives way to them


def time_step(run: Run, layout: Layout) -> float:
    """Compiles a run's step under a layout, and returns its seconds in the fastest of some bursts.

    A burst lasts about `BURST_S`; its result is the mean of its steps.
    """
    mesh, step_spec = make_mesh(layout), train_step_spec(run, layout)
    batch = BatchSharding.of(run, layout, mesh).to_global_arrays(random_batch(run))
    state = init_state(step_spec, mesh)
    with jax.set_mesh(mesh):
        traced = train_step.trace(step_spec, state, batch)
        executable = compile_program(traced, mesh, run.compiler_options)

    def run_steps(steps: int) -> float:
        """Runs steps and returns their total seconds."""
        nonlocal state
        start = time.perf_counter()
        with jax.set_mesh(mesh):
            for _ in range(steps):
                state, metrics = executable(state, batch)
                jax.block_until_ready((state, metrics))
        return time.perf_counter() - start

    run_steps(1)
    steps = math.ceil(BURST_S / run_steps(1))
    return min(run_steps(steps) / steps for _ in range(BURSTS))


def random_batch(run: Run) -> dict[str, np.ndarray]:
    """Makes rows of one full segment each."""
    rng, rows = np.random.default_rng(0), run.batch_sequences
    vocab = min(run.model.vocab_rows, run.model.source_vocab or run.model.vocab_rows)

    def array(name: str, shape: tuple[int, ...]) -> np.ndarray:
        if name.startswith("segments"):
            return np.ones((rows, *shape), np.int32)
        if name.startswith("positions"):
            return np.tile(np.arange(*shape, dtype=np.int32), (rows, 1))
        return rng.integers(FIRST_TOKEN, vocab, (rows, *shape)).astype(np.int32)

    return {name: array(name, shape) for name, shape in run.task.array_shapes.items()}


Hardware = Topology | HostRates
MIN_GAIN = 0.005  # share of a step: a smaller gain is not worth an order in the file
STANDARD = {DATA_PARALLEL: 1, FSDP: 1, FSDP_AND_MODEL: 2}
"""Rules of layouts that are always compiled, with the number of mesh shapes for each."""
OF_WEIGHTS = ("parameters", "optimizer state", "gradients")
"""Causes of memory that are sharded like weights."""
OVERESTIMATE = 1.25
"""Upper bound of a trace's memory over the compiled program's (docs/planning.md)."""


def candidates(record: Record, devices: int, rows: int = 0) -> Iterator[Layout]:
    """Yields every legal layout on one or two mesh axes that divides `rows`; any divides 0."""
    for data, model in shapes(devices):
        if rows % data == 0:
            yield from legal_layouts_on(record, {"data": data, "model": model})


def with_shard_axis(record: Record, layout: Layout) -> Iterator[Layout]:
    """Yields layouts of the same shape that split weights and experts over fewer devices."""
    sizes = mesh_sizes(layout.mesh, None)
    data, model = sizes.get("data", 1), sizes.get("model", 1)
    for shard in range(2, data):
        if data % shard == 0:
            mesh = {"data": data // shard, "shard": shard, "model": model}
            yield from legal_layouts_on(record, mesh)


def legal_layouts_on(record: Record, mesh: Mapping[str, int]) -> Iterator[Layout]:
    """Yields every legal layout on these mesh axes."""
    sizes = {name: size for name, size in mesh.items() if size > 1} or {"data": 1}
    for rules, param_rules in rule_sets(record, sizes):
        layout = Layout(mesh=format_mesh(sizes), rules=rules, param_rules=param_rules)
        problems = lint(layout, sizes, record, {})
        if not any(problem.severity == "error" for problem in problems):
            yield layout


def shapes(devices: int) -> list[tuple[int, int]]:
    """Returns mesh shapes: numbers of data-parallel and model-parallel devices."""
    return [(devices // n, n) for n in range(1, devices + 1) if devices % n == 0]


def rule_sets(record: Record, sizes: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """Yields rules and parameter rules for a mesh of these sizes."""
    rows = next((name for name in ("shard", "data") if name in sizes), None)
    has_experts = any("E" in weight.axes for weight in record.weights)
    has_images = any("Y" in tensor.axes for tensor in record.tensors)
    batch = [f"batch:{name}" for name in ("data", "shard") if name in sizes]
    over_model = [("", "")]
    if "model" in sizes:
        over_model = [(MODEL, activation) for activation in ACTIVATIONS]
        over_model += [(IMAGES, "")] if has_images else []
    weights = [rule for rule in WEIGHTS if rows or not rule]
    experts = [""]
    if has_experts and rows:
        experts += [EXPERTS, EVERYWHERE] if "model" in sizes else [EXPERTS]
    for (model, activation), weight, expert in itertools.product(over_model, weights, experts):
        if weight.endswith("?") and not expert:
            continue  # the same as without
        if "shard" in sizes and not weight and not expert:
            continue  # the same as without that mesh axis
        if expert == EVERYWHERE:
            model = model.replace("d_ff:model", "d_ff:model?")
        rules = [*batch, model, activation, expert.format(rows=rows)]
        yield ";".join(rule for rule in rules if rule), weight.format(rows=rows)


def rank_layouts(
    stages: Sequence[Run], hardware: Hardware, configured: Sequence[Layout]
) -> list[StepPlan]:
    """Ranks candidates and layouts of the run's files by their traces, the fastest that fits first.

    Layouts must be legal in all stages of a run; the last stage is traced.  The best layout is
    also tried with a third mesh axis.
    """
    *_, run = stages
    record, devices = record_loss(run), hardware.devices
    every = {*configured, *candidates(record, devices, run.microbatch_rows)}
    if not (layouts := legal_layouts(stages, devices, every)):
        raise UserError(
            f"no layout splits this model and batch over {devices} devices.  Choose other devices, "
            "or a Run.batch_sequences with more divisors."
        )
    ranking = fastest_first(plan_layouts(run, drop_oversized(run, layouts, hardware), hardware))
    wider = legal_layouts(stages, devices, with_shard_axis(record, ranking[0].layout))
    wider = drop_oversized(run, wider, hardware)
    return fastest_first([*ranking, *plan_layouts(run, wider, hardware)])


def plan_layouts(run: Run, layouts: list[Layout], hardware: Hardware) -> Iterator[StepPlan]:
    """Plans each layout from its trace, on a slice with the best order of devices."""
    for number, layout in enumerate(layouts, 1):
        if (plan := plan_if_traceable(run, layout, hardware)) is None:
            continue
        plan = with_best_order(plan) if isinstance(hardware, Topology) else plan
        name = one_line(plan.layout)
        logger.info("%d of %d: %s: %.4g s", number, len(layouts), name, plan.step_s)
        yield plan


def plan_if_traceable(run: Run, layout: Layout, hardware: Hardware) -> StepPlan | None:
    """Plans a layout; None if JAX cannot shard the step this way, although the layout is legal."""
    sizes = mesh_sizes(layout.mesh, hardware.devices)
    try:
        return training.plan_from_trace(run, layout, sizes, hardware)
    except (UserError, RunError):
        raise
    except Exception:
        problem = find_untraceable(run, layout, sizes, {}, trace_train_step)
        if problem is None:
            raise
        logger.info("Skipped %s: %s", one_line(layout), problem)
        return None


def legal_layouts(stages: Sequence[Run], devices: int, layouts: Iterable[Layout]) -> list[Layout]:
    """Keeps layouts that divide every microbatch of all stages, sorted by name."""
    rows = math.gcd(*(run.microbatch_rows for run in stages))
    dividing = (x for x in layouts if rows % batch_shards(x, mesh_sizes(x.mesh, devices)) == 0)
    return sorted(dividing, key=one_line)


def drop_oversized(run: Run, layouts: list[Layout], hardware: Hardware) -> list[Layout]:
    """Drops layouts whose weights and gradients do not fit; if none fits, keeps the smallest."""
    if isinstance(hardware, HostRates) or not layouts:
        return layouts
    weights = record_loss(run).weights

    def least_bytes(layout: Layout) -> int:
        rows = table(weights, layout, mesh_sizes(layout.mesh, hardware.devices))
        return 2 * sum(row.bytes_per_device for row in rows)

    limit_bytes = max(hardware.chip.memory_bytes, min(map(least_bytes, layouts)))
    return [layout for layout in layouts if least_bytes(layout) <= limit_bytes]


def with_best_order(plan: StepPlan) -> StepPlan:
    """Returns the plan with the simplest order of devices under which its layout is fast."""
    assert plan.topology is not None
    every = (None, *orders(plan.mesh, plan.topology.torus), plan.layout.order)
    reordered = [training.with_device_order(plan, order) for order in every]
    limit_s = (1 + MIN_GAIN) * min(map(known_step_s, reordered))
    return next(other for other in reordered if known_step_s(other) <= limit_s)


def fastest_first(plans: Iterable[StepPlan]) -> list[StepPlan]:
    """Sorts plans by time; those that do not fit come last."""
    return sorted(plans, key=lambda plan: (plan.fits is False, known_step_s(plan)))


def known_step_s(plan: StepPlan) -> float:
    assert plan.step_s is not None
    return plan.step_s


def shortlist(ranking: Sequence[StepPlan], of_run: Sequence[Layout], count: int) -> list[StepPlan]:
    """Returns the best plans of a ranking, then standard layouts and those of the run's files."""
    chosen = list(ranking[:count])
    for rules, shapes in STANDARD.items():
        kind = [p for p in ranking if (p.layout.rules, p.layout.param_rules) == rules]
        chosen += [plan for plan in kind if may_fit(plan)][:shapes]
    of_files = {unordered(layout) for layout in of_run}
    chosen += [plan for plan in ranking if unordered(plan.layout) in of_files]
    return list({unordered(plan.layout): plan for plan in chosen}.values())


def may_fit(plan: StepPlan) -> bool:
    """Returns whether the program may fit, even if its trace does not."""
    memory_bytes = math.inf if plan.topology is None else plan.topology.chip.memory_bytes
    return plan.memory.needed_bytes <= OVERESTIMATE * memory_bytes


def unordered(layout: Layout) -> Layout:
    return dataclasses.replace(layout, order=None)


def one_line(layout: Layout) -> str:
    """Describes a layout in one line."""
    order = "" if layout.order is None else f"order {layout.order}"
    settings = (layout.mesh, layout.rules, layout.param_rules, order)
    return " | ".join(setting for setting in settings if setting)


def suggest_slice(plan: ProgramPlan, run: Run, weight_bytes: int | None = None) -> str:
    """Names the smallest slice of these chips that holds the run if everything splits evenly.

    At least one layout splits batch and model over it.  `weight_bytes` is the size of one copy of
    the weights, if they are not stored as in training.
    """
    assert plan.topology is not None
    topology, record = plan.topology, record_loss(run)
    by_cause = plan.memory.bytes_by_cause
    if weight_bytes is None:
        weight_bytes = sum(math.prod(w.shape) * w.dtype.itemsize for w in record.weights)
    # Counts copies of the weights, and of what is sharded like them, once.
    share = 1 - weight_bytes / max(by_cause["parameters"] * plan.devices, weight_bytes)
    copied_bytes = share * sum(by_cause.get(name, 0) for name in OF_WEIGHTS)
    all_bytes = plan.devices * (plan.memory.needed_bytes - copied_bytes)
    devices = math.ceil(all_bytes / topology.chip.memory_bytes)
    needed = f"Split evenly, these settings need about {devices:,} devices"
    if devices <= plan.devices:
        return f"{needed}: a layout that shards weights may fit, such as layouts/fsdp.gin."
    *_, largest = offered = offered_slices(topology.kind)
    if devices > largest.devices:
        return f"{needed}; the largest slice, {largest.name}, has {largest.devices:,}."
    by_devices = {other.devices: other for other in reversed(offered) if other.devices >= devices}
    for number, other in sorted(by_devices.items()):
        if next(candidates(record, number, run.microbatch_rows), None) is not None:
            return f"{needed}: try --topology={other.name}."
    return f"{needed}; no slice of that size divides batch and model."
