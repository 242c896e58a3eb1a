"""Checks cached data and the files of a run."""

import shlex
from collections.abc import Iterator
from pathlib import Path

from configs.errors import UserError
from configs.load import Config
from data import manifest
from data.cache import TaskCaches, cache_folders, check_rows
from data.storage.arrays import REBUILD
from data.storage.lookup import sizes_below
from scripts.commands.common import epochs_text, task_of
from scripts.commands.doctor.findings import Finding, failure
from scripts.commands.shared_flags import SavedSettingsFlags
from trainer.checkpoints.manager import Checkpoints
from trainer.metrics.jsonl import EVALUATIONS, METRICS, split_lines
from trainer.model_dir import ModelDir
from trainer.processes.training_lock import holder_of
from trainer.resume.history import last_saved
from trainer.run import Run


def task_cache(
    config: Config, settings: SavedSettingsFlags, data_dir: Path, reads_rows: bool
) -> Iterator[Finding]:
    """Opens the cache of the task that the settings name."""
    task = task_of(config)
    name = f"data of {task.name}"
    run = settings.model_dir and ModelDir(settings.model_dir)
    run = run if run and run.has_run() else None
    files = [*([str(run.config_file)] if run else []), *settings.gin_file]
    flags = [f"--data_dir={data_dir}", *(f"--gin_file={file}" for file in files),
             *(f"--gin_param={param}" for param in settings.gin_param)]  # fmt: skip
    command = shlex.join(["meshloom", "prepare", *flags])
    try:
        vocabs = run and run.vocabs(task)
    except ValueError as error:
        yield failure("vocabulary", error)
        return
    try:
        prepared = None
        if run and vocabs:
            prepared = TaskCaches(task, data_dir, vocabs, run.content_hash).open_if_built()
        prepared = prepared or TaskCaches(task, data_dir).open_if_built()
        if prepared is not None and reads_rows:
            check_rows(prepared.folder)
    except ValueError as error:
        yield failure(name, error)._replace(fix=f"{command} --rebuild")
        return
    if prepared is None:
        text = f"not in {data_dir} yet: training prepares it first"
        if config.value("Run.epochs") is not None:
            text += ", and the number of steps follows from it (Run.epochs)"
        yield Finding(name, "warning", text, command)
        return
    if config.value("Run.epochs") is not None and "Run.model" in config.bound:
        text = epochs_text(config.make(Run), len(prepared.splits["train"]))
        yield Finding("length of the run", "ok", text)
    read = ", all rows read" if reads_rows else ""
    text = f"content hash {prepared.manifest['content_hash'][:16]}{read}"
    yield Finding(name, "ok", text, "Copy one host's cache to the others, or correct their text: "
                  f"{command} --rebuild", is_common=True)  # fmt: skip
    if run and vocabs:
        if vocabs.hashes() != prepared.vocabs.hashes():
            text = f"the vocabulary of {run.model_dir} is not that of {data_dir}"
            yield Finding("vocabulary", "error", text, "Give the --data_dir of the training.")
        else:
            yield Finding("vocabulary", "ok", "the run and its data have the same")


def every_cache(data_dir: Path, reads_rows: bool) -> Iterator[Finding]:
    """Looks at each cache of a folder: whether its files are there and whole."""
    folders = cache_folders(data_dir)
    for folder in folders:
        name = f"data of {folder.name}"
        try:
            content_hash = manifest.read(folder).get("content_hash")
            if content_hash is None:
                raise UserError(f"{folder}: is a cache of another version.  {REBUILD}")
            if reads_rows:
                check_rows(folder)
        except ValueError as error:
            yield failure(name, error)
        else:
            yield Finding(name, "ok", f"content hash {content_hash[:16]}")
    if not folders:
        yield Finding("data", "ok", f"nothing is prepared in {data_dir}")


def run_files(model_dir: Path, reads_arrays: bool) -> Iterator[Finding]:
    """Verifies the checkpoints of a run, which a training may remove, and lines of its metrics."""
    if (lock := holder_of(model_dir)) is not None:
        holder, is_alive = lock
        text = f"{holder}, trains there" if is_alive else f"{holder}, has ended without unlocking"
        yield Finding("lock", "ok", text)
    with Checkpoints(model_dir) as checkpoints:
        steps = checkpoints.steps()
        damages = {step: checkpoints.damage(step, reads_arrays=reads_arrays) for step in steps}
        damages = {step: damages[step] for step in checkpoints.steps() if step in damages}
    whole = [step for step, damage in damages.items() if damage is None]
    for step, damage in damages.items():
        if damage is not None:
            folder = checkpoints.folder / str(step)
            text = f"step {step} is damaged: {damage}"
            yield Finding("checkpoints", "error", text,
                          shlex.join(["mv", str(folder), f"{folder}.set-aside"]))  # fmt: skip
    if whole:
        read = ", all arrays read" if reads_arrays else ""
        yield Finding("checkpoints", "ok", f"steps {', '.join(map(str, whole))} are whole{read}")
    elif not damages:
        if saved := last_saved(model_dir):
            text = f"{model_dir} has none, and its run reached step {saved}"
            yield Finding("checkpoints", "error", text, "Mount or copy them back.")
        else:
            file = "" if ModelDir(model_dir).has_run() else " --gin_file=FILE"
            yield Finding("checkpoints", "warning", f"{model_dir} has none",
                          f"meshloom train --model_dir={model_dir}{file}")  # fmt: skip
    for name in (METRICS, EVALUATIONS):
        if damaged_lines := len(split_lines(model_dir / name, "loss")[1]):
            text = f"{damaged_lines} lines of {model_dir / name} are damaged"
            yield Finding("metrics", "warning", text, "The next `meshloom train` sets them aside.")


def newest_checkpoint_bytes(model_dir: Path) -> int:
    """Returns the size of the newest checkpoint; 0 without a checkpoint."""
    if not (steps := Checkpoints(model_dir).steps()):
        return 0
    return sum(size for _, size in sizes_below(model_dir / "checkpoints" / str(max(steps))))
