"""Defines the flags of devices and processes, and starts them."""

import os
from typing import Annotated

from scripts.flag import Flag, FlagGroup
from trainer.processes.join import Distributed, find_process_id, join


class DeviceFlags(FlagGroup):
    """Selects the devices of this process."""

    HEADING = "Devices and processes"
    simulate_devices: Annotated[int | None, Flag(min=1)] = None
    """Runs on N virtual CPU devices."""


class ProcessFlags(DeviceFlags):
    """Describes the processes of a run, for commands that several processes execute together."""

    distributed: Annotated[Distributed, Flag(has_variable=True)] = "auto"
    """How the processes of a run find each other: auto detects TPU pods, GKE, SLURM and Open MPI;
    manual uses the next three flags (and is implied by them); off runs one process."""
    coordinator_address: Annotated[str | None, Flag(metavar="HOST:PORT", has_variable=True)] = None
    """Address on which process 0 listens."""
    process_count: Annotated[int | None, Flag(min=1, has_variable=True)] = None
    """Number of processes."""
    process_index: Annotated[int | None, Flag(metavar="I", min=0, has_variable=True)] = None
    """Index of this process."""
    start_timeout_s: Annotated[float, Flag(metavar="S", min=1, has_variable=True)] = 300.0
    """Seconds to wait for all processes."""


def start_devices(flags: DeviceFlags | None = None) -> None:
    """Sets up devices and processes before anything uses them."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    process = None
    if isinstance(flags, ProcessFlags):
        process = find_process_id(
            flags.distributed, flags.coordinator_address, flags.process_count,
            flags.process_index, flags.start_timeout_s,
        )  # fmt: skip
    from layouts import absent_devices, mesh

    mesh.cache_compilations()
    absent_devices.leave_absent_devices()
    if flags is not None and flags.simulate_devices is not None:
        mesh.simulate_devices(flags.simulate_devices)
    if isinstance(flags, ProcessFlags) and process is not None:
        from scripts.terminal import show_log_records

        show_log_records("trainer")  # names the processes that are missing
        join(process, flags.start_timeout_s)
