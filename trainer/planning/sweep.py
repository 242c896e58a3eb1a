"""Sweeps settings of a run that mainly change its cost; finds those that need less memory."""

import dataclasses
import functools
import logging
import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple, get_args

from configs.errors import UserError
from layouts.candidates import candidates
from layouts.cost.interconnect import Topology, offered_slices
from layouts.layout import Layout
from layouts.mesh import batch_shards, mesh_sizes
from models.spec import Remat, SavedProduct
from models.transformer import Transformer
from trainer.checks import check_run, record_loss
from trainer.planning.run_cost import HOUR_S
from trainer.planning.search import legal_layouts, plan_if_traceable
from trainer.planning.training import StepPlan
from trainer.run import Run

logger = logging.getLogger(__name__)
BATCH_FACTORS = (0.5, 1, 2)
MICROBATCHES = (1, 2, 4, 8, 16, 32)
REMAT: tuple[Remat, ...] = get_args(Remat)
PROJECTIONS: tuple[SavedProduct, ...] = ("query_proj", "key_proj", "value_proj", "out_proj")


class SweepPoint(NamedTuple):
    """Holds one combination of settings that fits, and its plan."""

    layout: str
    """Name of the layout."""
    plan: StepPlan
    tokens: int
    """Tokens that the whole run reads, the same for all points."""

    @property
    def settings(self) -> dict[str, str | int]:
        """Lists the settings of this point, under the names of gin files."""
        run = self.plan.run
        settings: dict[str, str | int] = {
            "layout": self.layout,
            "Run.batch_sequences": run.batch_sequences,
            "Run.microbatches": run.microbatches,
        }
        if isinstance(run.model, Transformer):
            settings |= {
                "Transformer.remat": run.model.remat,
                "Transformer.remat_saves": ", ".join(run.model.remat_saves),
                "Transformer.remat_offloads": ", ".join(run.model.remat_offloads),
                "Precision.compute": run.model.precision.compute,
                "Precision.store": run.model.precision.store,
            }
        return settings

    @property
    def step_s(self) -> float:
        assert self.plan.step_s is not None
        return self.plan.step_s

    @property
    def hours(self) -> float:
        """Returns how long all tokens of the run take."""
        return self.tokens / self.plan.tokens_per_step * self.step_s / HOUR_S

    @property
    def chip_hours(self) -> float:
        assert self.plan.topology is not None
        return self.hours * self.plan.topology.chips


def sweep(run: Run, layouts: Mapping[str, Layout], topology: Topology) -> list[SweepPoint]:
    """Plans all combinations by their traces; returns those that fit, the cheapest first.

    Each combination has the fewest microbatches with which it fits; more save only memory.
    """
    tokens = run.total_steps * run.batch_sequences * run.task.length
    combinations = [(name, variant) for variant in variants(run) for name in layouts]
    points = []
    for number, (name, variant) in enumerate(combinations, 1):
        plan = least_microbatches(variant, layouts[name], topology)
        if plan is None:
            logger.info("%d of %d: %s: does not fit", number, len(combinations), name)
            continue
        points.append(SweepPoint(name, plan, tokens))
        settings = ", ".join(f"{name} = {value}" for name, value in points[-1].settings.items())
        step_s = points[-1].step_s
        logger.info("%d of %d: %s: %.4g s", number, len(combinations), settings, step_s)
    return sorted(points, key=lambda point: point.chip_hours)


def variants(run: Run) -> Iterator[Run]:
    """Yields the run with other batches, recomputation and precision (its own, and bfloat16)."""
    model, models = run.model, [run.model]
    if isinstance(model, Transformer):
        half = dataclasses.replace(model.precision, compute="bfloat16")
        models = [
            dataclasses.replace(recomputed, precision=precision)
            for precision in dict.fromkeys([model.precision, half])
            for recomputed in recomputations(model)
        ]
    for factor in BATCH_FACTORS:
        rows = round(factor * run.batch_sequences)
        for model in models if rows and rows == factor * run.batch_sequences else ():
            yield dataclasses.replace(run, batch_sequences=rows, microbatches=1, model=model)


def recomputations(model: Transformer, *, offload: bool = False) -> list[Transformer]:
    """Returns the model with each kind of recomputation; "full" also with saved projections.

    With `offload` also with inputs of layers, and projections, in the memory of the host.
    """
    plain = dataclasses.replace(model, remat="full", remat_saves=(), remat_offloads=())
    kinds = [dataclasses.replace(plain, remat=remat) for remat in REMAT]
    kinds.append(dataclasses.replace(plain, remat_saves=PROJECTIONS))
    if offload:
        inputs = dataclasses.replace(plain, remat_offloads=("layer_input",))
        kinds += [inputs, dataclasses.replace(inputs, remat_saves=PROJECTIONS)]
        kinds.append(dataclasses.replace(plain, remat_offloads=("layer_input", *PROJECTIONS)))
    return list(dict.fromkeys([model, *kinds]))


def least_microbatches(run: Run, layout: Layout, topology: Topology) -> StepPlan | None:
    """Plans a run with the fewest microbatches with which it fits; None if it never does."""
    shards = batch_shards(layout, mesh_sizes(layout.mesh, topology.devices))
    counts = [count for count in MICROBATCHES if divides(run, count, shards)]

    @functools.cache
    def fitting(microbatches: int) -> StepPlan | None:
        divided = dataclasses.replace(run, microbatches=microbatches)
        plan = plan_if_traceable(divided, layout, topology)
        return plan if plan is not None and plan.fits else None

    # The last count takes the least memory: where the first and the last do not fit, none does.
    if not any(fitting(count) for count in (*counts[:1], *counts[-1:])):
        return None
    return next(filter(None, map(fitting, counts)))


def divides(run: Run, microbatches: int, shards: int) -> bool:
    """Returns whether microbatches divide over the shards of a batch, and into groups of tokens."""
    if run.batch_sequences % (microbatches * shards):
        return False
    try:
        check_run(dataclasses.replace(run, microbatches=microbatches))
    except UserError:
        return False
    return True


def suggest_slice(plan: StepPlan) -> str:
    """Names the smallest slice of these chips that holds the run, if all of it splits evenly.

    Some layout splits batch and model over its devices.
    """
    assert plan.topology is not None
    run, topology, all_bytes = plan.run, plan.topology, plan.memory.needed_bytes * plan.devices
    devices = math.ceil(all_bytes / topology.chip.memory_bytes)
    needed = f"Split evenly, it needs at least {devices:,} devices"
    *_, largest = offered = offered_slices(topology.kind)
    if devices > largest.devices:
        return f"{needed}; the largest slice, {largest.name}, has {largest.devices:,}."
    record = record_loss(run)
    for other in offered:
        if other.devices >= devices and legal_layouts(
            run, other.devices, candidates(record, other.devices)
        ):
            return f"{needed}: try --topology={other.name}."
    return f"{needed}; no slice of that size divides batch and model."
