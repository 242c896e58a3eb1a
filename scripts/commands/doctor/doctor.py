"""Runs `meshloom doctor`: checks the machine, the cached data and the files of a run."""

import functools
import shlex
import socket
from collections.abc import Iterator
from pathlib import Path

from configs.errors import RunError, UserError
from configs.load import Config
from data import manifest
from data.cache import TaskCaches, cache_folders, check_rows
from data.storage.arrays import REBUILD
from data.storage.lookup import sizes_below
from scripts import devices
from scripts.commands.common import data_dir_of, epochs_text, settings, task_of, write_json
from scripts.commands.doctor import machine
from scripts.commands.doctor.findings import Check, Finding, failure, findings_of, merged
from scripts.commands.doctor.flags import DoctorFlags
from scripts.commands.shared_flags import SavedSettingsFlags
from trainer import multihost
from trainer.checkpoints.manager import Checkpoints
from trainer.metrics.jsonl import EVALUATIONS, METRICS, split_lines
from trainer.model_dir import ModelDir
from trainer.processes import peers
from trainer.processes.peers import join_names
from trainer.processes.training_lock import holder_of
from trainer.resume.history import last_saved
from trainer.run import Run


def doctor(flags: DoctorFlags) -> None:
    """Prints the findings of each check; raises `RunError` if one is an error."""
    findings = findings_of([("processes", lambda: processes(flags)), ("devices", machine.devices)])
    is_joined = findings[0].status != "error"  # otherwise the others would wait in vain
    given, config, is_readable = flags.settings, None, True
    model_dir = given.model_dir
    if model_dir is not None and not (ModelDir(model_dir).has_run() or ModelDir(model_dir).record):
        model_dir = None  # training has not made it yet
    if model_dir is not None or given.gin_file or given.gin_param:
        try:
            config = settings(model_dir, given.gin_file, given.gin_param)
        except UserError as error:
            findings.append(failure("settings", error))
            is_readable = False
    findings += findings_of(checks(flags, config).items())
    if is_joined:
        if flags.compares_devices and all(multihost.gather(is_readable)):
            findings += findings_of([("gradients", lambda: machine.gradients(config))])
        findings += machine.clocks()
        findings = merged(multihost.gather(findings))
    others = peers.current() if is_joined else None
    for finding in findings:
        text = f"{finding.status:8} {finding.check}: {finding.text}"
        if finding.status != "ok":
            if others is not None and finding.processes:
                text += f" ({join_names(finding.processes)})"
            text += "" if finding.fix is None else f"\n{'':9}fix: {finding.fix}"
        print(text)
    write_json(flags.json_file, [finding._asdict() for finding in findings])
    if errors := sum(finding.status == "error" for finding in findings):
        raise RunError(f"{errors} of {len(findings)} findings are errors.")


def processes(flags: DoctorFlags) -> Iterator[Finding]:
    """Starts the devices, and connects to the other processes of the run if there are any."""
    devices.start_devices(flags.processes)
    if peers.current() is None:
        yield Finding("processes", "ok", "this one alone")
        return
    hosts = ", ".join(dict.fromkeys(multihost.gather(socket.gethostname())))
    yield Finding("processes", "ok", f"all answer, and compute together; hosts: {hosts}")


def checks(flags: DoctorFlags, config: Config | None) -> dict[str, Check]:
    """Returns the checks that each process can make without the others."""
    given = flags.settings
    data_dir = data_dir_of(flags.data_dir, given.model_dir).expanduser()
    every: dict[str, Check] = {
        "versions": machine.versions,
        "memory": machine.memory,
        "disk of --data_dir": lambda: machine.disk("--data_dir", data_dir),
    }
    if given.model_dir is not None:
        model_dir = given.model_dir.expanduser()
        every["disk of --model_dir"] = lambda: machine.disk(
            "--model_dir", model_dir, newest_checkpoint_bytes(model_dir)
        )
        every["run"] = lambda: run_files(model_dir, flags.data)
    names_task = config is not None and any(b.spec != "Layout" for b in config.bound.values())
    every["data"] = (
        functools.partial(every_cache, data_dir, flags.data)
        if config is None or not names_task
        else functools.partial(task_cache, config, given, data_dir, flags.data)
    )
    return every


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
            text = f"the vocabularies of {run.model_dir} and {data_dir} differ"
            yield Finding("vocabulary", "error", text, "Give the --data_dir that training used.")
        else:
            yield Finding("vocabulary", "ok", "the run and its data use the same")


def every_cache(data_dir: Path, reads_rows: bool) -> Iterator[Finding]:
    """Checks that the files of each cache in a folder are there and complete."""
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
    """Verifies the checkpoints of a run, which training may remove meanwhile, and its metrics."""
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
        yield Finding("checkpoints", "ok", f"steps {', '.join(map(str, whole))} are complete{read}")
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
