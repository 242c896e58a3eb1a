"""Runs `meshloom evaluate --harness`: scores checkpoints on tasks of lm-evaluation-harness."""

import dataclasses
import functools
import json
import os
import random
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from lm_eval.api.task import Task
from lm_eval.defaults import DEFAULT_OTHER_SEED, DEFAULT_RANDOM_SEED
from lm_eval.evaluator import evaluate
from lm_eval.tasks import TaskManager
from lm_eval.utils import handle_non_serializable

from configs.errors import UserError, brief, did_you_mean
from configs.paths import path_of
from scripts.commands.common import write_json
from scripts.commands.decoding.decode import decoder_of, trace_fns_of
from scripts.commands.evaluation.flags import EvaluateFlags
from scripts.commands.shared_flags import SearchFlags
from scripts.commands.trained import batch_of, trained_models
from scripts.flag import given_flags
from scripts.terminal import print_table, progress_bar
from trainer.checkpoints.restore import chosen_steps
from trainer.harness import HarnessModel

SHARED_FLAGS = ("--batch_sequences", "--json", "--tag", "--resamples")
GREEDY = SearchFlags(beam=1)


def evaluate_harness(flags: EvaluateFlags) -> list[dict[str, Any]]:
    """Scores checkpoints on tasks, and prints a table of their metrics."""
    given = [n for g in (flags, flags.text, flags.search, flags.metrics) for n in given_flags(g)]
    if others := [name for name in given if name not in SHARED_FLAGS]:
        raise UserError(f"{', '.join(others)}: not with --harness.  Remove one of them.")
    harness = flags.harness
    tasks = load_tasks(harness.harness or "")
    # Otherwise the harness would fork this process, which has the threads of JAX.
    os.environ["DISABLE_MULTIPROC"] = "1"
    lines, traced = [], trace_fns_of(GREEDY)  # close enough to explain layout errors
    with trained_models(flags.model, traced) as models, progress_bar("harness") as update:
        for step in chosen_steps(models.checkpoints, flags.model.checkpoint):
            trained = models.restore(step, flags.model.average)
            make_decoder = functools.partial(decoder_of, [trained], GREEDY, flags.batch_sequences)
            batch_sequences = batch_of(trained, flags.batch_sequences)
            model = HarnessModel(trained, batch_sequences, make_decoder, flags.text.tag, update)
            set_shots(tasks["tasks"].values(), harness.shots)
            try:
                results = evaluate(
                    model, tasks, limit=harness.limit, bootstrap_iters=flags.metrics.resamples,
                    apply_chat_template=harness.apply_chat_template,
                    fewshot_as_multiturn=harness.apply_chat_template,
                )  # fmt: skip
            except UserError:
                raise
            except (LookupError, ValueError, ArithmeticError, StopIteration) as error:
                raise UserError(
                    f"--harness={harness.harness}: a task fails: {type(error).__name__}: "
                    f"{brief(str(error), 400)}.  Check its data, and --shots."
                ) from error
            line = {"step": trained.step, "averaged_steps": trained.averaged_steps}
            line |= {"settings": dataclasses.asdict(harness)}
            lines.append(line | json.loads(json.dumps(results, default=handle_non_serializable)))
    rows = [row for line in lines for row in rows_of(line)]
    if silent := tasks["tasks"].keys() - {row[1] for row in rows}:
        raise UserError(
            f"--harness: {', '.join(sorted(silent))}: name metrics of the harness, such as acc."
        )
    print_table(["step", "task", "shots", "metric", "filter", "value", "standard error"], rows)
    write_json(flags.json_file, lines if len(lines) > 1 else lines[0])
    return lines


def load_tasks(names: str) -> dict[str, dict[str, Any]]:
    """Loads tasks and groups of tasks: names, YAML files and folders, separated by commas."""
    chosen = list[str]()
    for name in filter(None, names.split(",")):
        chosen += sorted(map(str, path_of(name).expanduser().glob("[!_]*.yaml"))) or [name]
    if not chosen:
        raise UserError(f"--harness={names}: no task.  Give names that `lm-eval ls tasks` lists.")
    manager = TaskManager(include_defaults=not all(name.endswith(".yaml") for name in chosen))
    tasks: dict[str, dict[str, Any]] = {"tasks": {}, "groups": {}}
    for name in chosen:
        is_file = path_of(name).expanduser().is_file()
        if not is_file and name not in manager.all_tasks:
            raise UserError(
                f"--harness={name}: no such task.{did_you_mean(name, manager.all_tasks)}  Legal: "
                "a name that `lm-eval ls tasks` lists, a YAML file, or a folder of them."
            )
        try:
            loaded = manager.load(name)
        except Exception as error:  # the library raises nothing more specific
            problem = f"{type(error).__name__}: {brief(str(error), 400)}"
            raise UserError(
                f"--harness={name}: cannot be loaded: {problem}.  A file must hold one task, whose "
                "data has examples."
            ) from None
        for kind, by_name in tasks.items():
            by_name |= loaded[kind]
    return tasks


def set_shots(tasks: Iterable[Task], shots: int | None) -> None:
    """Sets shots and seeds as the harness's own command does; a task with 0 shots keeps 0."""
    random.seed(DEFAULT_RANDOM_SEED)
    np.random.seed(DEFAULT_OTHER_SEED)
    for task in tasks:
        task.set_fewshot_seed(DEFAULT_OTHER_SEED)
        if (of_task := task.get_config("num_fewshot")) != 0:
            task.set_config("num_fewshot", (of_task or 0) if shots is None else shots)


def rows_of(line: Mapping[str, Any]) -> Iterator[list[object]]:
    """Yields a row for each metric of a checkpoint."""
    for task, metrics in line["results"].items():
        for name, value in metrics.items():
            metric, comma, kind = name.partition(",")
            if comma and not metric.endswith("_stderr"):
                error = metrics.get(f"{metric}_stderr,{kind}")
                numbers = [f"{x:.4f}" if isinstance(x, float) else x for x in (value, error)]
                yield [line["step"], task, line["n-shot"].get(task, ""), metric, kind, *numbers]
