"""Runs `meshloom doctor`: checks the machine, the cached data and a run."""

import functools
import socket
from collections.abc import Iterator

from configs.errors import RunError, UserError
from configs.load import Config
from scripts import devices
from scripts.commands.common import data_dir_of, settings, write_json
from scripts.commands.doctor import machine, runs
from scripts.commands.doctor.findings import Check, Finding, failure, findings_of, merged
from scripts.commands.doctor.flags import DoctorFlags
from trainer import multihost
from trainer.model_dir import ModelDir
from trainer.processes import peers
from trainer.processes.peers import join_names


def doctor(flags: DoctorFlags) -> None:
    """Prints what each check finds; raises where something is an error."""
    findings = findings_of([("processes", lambda: processes(flags)), ("devices", machine.devices)])
    is_joined = findings[0].status != "error"  # or the others would wait in vain
    given, config, is_readable = flags.settings, None, True
    model_dir = given.model_dir
    if model_dir is not None and not ModelDir(model_dir).has_run():
        model_dir = None  # training has still to make it
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
    """Starts the devices, and connects to the other processes of the run where there are any."""
    devices.start_devices(flags.processes)
    if peers.current() is None:
        yield Finding("processes", "ok", "this one alone")
        return
    hosts = ", ".join(dict.fromkeys(multihost.gather(socket.gethostname())))
    yield Finding("processes", "ok", f"all answer, and compute together; hosts: {hosts}")


def checks(flags: DoctorFlags, config: Config | None) -> dict[str, Check]:
    """Returns the checks that each process makes without the others."""
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
            "--model_dir", model_dir, runs.newest_checkpoint_bytes(model_dir)
        )
        every["run"] = lambda: runs.run_files(model_dir, flags.data)
    names_task = config is not None and any(b.spec != "Layout" for b in config.bound.values())
    every["data"] = (
        functools.partial(runs.every_cache, data_dir, flags.data)
        if config is None or not names_task
        else functools.partial(runs.task_cache, config, given, data_dir, flags.data)
    )
    return every
