"""Compares the settings of a saved run with those of the run that continues it."""

import dataclasses
import itertools
import operator
from collections.abc import Sequence
from typing import Any

import jax

from configs.errors import UserError, listed
from configs.spec import SPECS
from configs.write import diff
from data.sources.mixing import MixedSource
from data.sources.text import Source
from layouts.layout import Layout
from layouts.mesh import make_mesh
from trainer.checkpoints.manager import by_path
from trainer.metrics.trackers import TrackerSpec
from trainer.optimizers.optimizer import OptimizerSpec
from trainer.optimizers.schedules import ScheduleSpec
from trainer.optimizers.spikes import SkipSpikes
from trainer.resume.history import Change
from trainer.run import Run
from trainer.step import train_step_spec

# Settings that may change at any time: how long, how often, how fast.  Models and their parts list
# theirs in `free_on_resume`.
FREE = ("Run.start_from", "Run.steps", "Run.epochs", "Run.checkpoint_every", "Run.log_every",
        "Run.local_checkpoint_every", "Run.stall_minutes", "Run.compiler_options",
        "Run.microbatches", "Run.trackers", "Run.replay_every")  # fmt: skip
FREE_PREFIXES = ("Run.keep_", "Run.evaluate_")
# Settings that change how the weights develop, but neither what they are nor the order of the data.
OVERRIDABLE = ("Run.batch_sequences", "Run.exclude", "Run.label_smoothing", "Run.z_loss",
               "Run.r_drop", "Run.best_by", "Run.bleu_sentences", "Run.skip_spikes", "Run.ema",
               "Teacher.weight", "Teacher.temperature", "Dpo.beta")  # fmt: skip


def check_changes(
    title: str, saved: Run, run: Run, *, override: bool, step: int = 0
) -> list[Change]:
    """Returns the settings that change after a step; raises if some may not, naming them."""
    changes = [Change(*row) for row in diff(saved, run)]
    added = adds_parts(saved.task.source, run.task.source)
    possible = [c for c in changes if _needs_override(c, step, added)]
    refused = [
        change
        for change in changes
        if not (is_free(change) or change in possible)
        or (change.name == "Run.batch_sequences" and _begun(saved.batch_stages, step))
    ]
    if not refused and opt_state_shapes(saved) != opt_state_shapes(run):
        refused = [change for change in changes if _may_change_arrays(change)]
    waiting = [] if override else [change for change in possible if change not in refused]
    if not refused and not waiting:
        return changes
    problems = [f"{change}: {_reason(change, step)}" for change in refused]
    problems += [f"{change}: legal with --override." for change in waiting]
    remedy = "Add --override to continue with the new values."
    if refused:
        names = ", ".join(change.name for change in refused)
        remedy = f"Leave {names} unchanged, also in config.gin, or choose another --model_dir."
    raise UserError(f"{listed(title, problems)}\n  {remedy}")


def is_free(change: Change) -> bool:
    """Returns whether a setting changes neither weights nor results."""
    return (
        change.name in FREE
        or change.name.startswith(FREE_PREFIXES)
        or issubclass(_spec_of(change), TrackerSpec)
        or change.name.rpartition(".")[2] in getattr(_spec_of(change), "free_on_resume", ())
    )


def _reason(change: Change, step: int) -> str:
    if _is_of_stages(change):
        return f"stages that begin before step {step} may not change."
    if _is_of_mixture(change, "parts"):
        same = len([*itertools.takewhile(bool, map(operator.eq, change.old, change.new))])
        return (
            f"part {same + 1} is the first that differs.  Legal: more parts after these, if the "
            "mixture began with rates and two or more parts."
        )
    if change.name == "Run.batch_sequences":
        return "a stage of Run.batch_stages has begun.  Add another to them."
    return "no longer the same model, opt_state or data."


def opt_state_shapes(run: Run) -> dict[str, tuple[int, ...]]:
    """Returns the shape of each optimizer array, by its path in a checkpoint."""
    layout, run = Layout(), dataclasses.replace(run, teacher=None)  # it has no state
    with jax.set_mesh(make_mesh(layout)):
        state = jax.eval_shape(train_step_spec(run, layout).initial_state)["opt_state"]
    return {path: leaf.shape for path, leaf in by_path(state).items()}


def _may_change_arrays(change: Change) -> bool:
    """Returns whether an optimizer's arrays may depend on a setting."""
    is_of_optimizer = issubclass(_spec_of(change), OptimizerSpec)
    is_schedule = isinstance(change.new, ScheduleSpec)
    return change.name == "Run.ema" or (is_of_optimizer and not is_schedule)


def _needs_override(change: Change, step: int, added: bool) -> bool:
    kinds = OptimizerSpec | ScheduleSpec | SkipSpikes
    if change.name in OVERRIDABLE or issubclass(_spec_of(change), kinds):
        return True
    if _is_of_mixture(change, "parts"):
        return added
    return _is_of_stages(change) and _begun(change.old, step) == _begun(change.new, step)


def _is_of_stages(change: Change) -> bool:
    names = ("Run.batch_stages", "Run.length_stages")
    return change.name in names or _is_of_mixture(change, "stages")


def _is_of_mixture(change: Change, name: str) -> bool:
    return issubclass(_spec_of(change), MixedSource) and change.name.endswith(f".{name}")


def adds_parts(saved: Source, source: Source) -> bool:
    """Returns whether a mixture keeps all its parts at their rates, and adds others after them."""
    if not isinstance(saved, MixedSource) or not isinstance(source, MixedSource):
        return False
    parts, now = list(saved.all_parts), list(source.all_parts)
    has_rates = saved.rates is not None and sum("train" in part.splits() for part in parts) > 1
    return has_rates and len(now) > len(parts) and now[: len(parts)] == parts


def _begun(stages: Sequence[tuple[int, Any]], step: int) -> list[tuple[int, Any]]:
    """Returns the stages that have begun by a step."""
    return [stage for stage in stages if stage[0] < step]


def _spec_of(change: Change) -> type[Any]:
    return SPECS[change.name.partition(".")[0]]
