"""Flags of devices and processes, and what they start."""

import os
from dataclasses import dataclass
from typing import Annotated

from configs.errors import UserError
from scripts.flag import Flag


@dataclass(frozen=True, kw_only=True)
class DeviceFlags:
    """The devices of this process."""

    HEADING = "Devices and processes"
    simulate_devices: Annotated[
        int | None, Flag("Runs on N virtual CPU devices.", metavar="N", min=1)
    ] = None


@dataclass(frozen=True, kw_only=True)
class ProcessFlags(DeviceFlags):
    """The processes of a run, for a command that several may execute together."""

    coordinator_address: Annotated[
        str | None, Flag("Address of process 0, where there are several.", metavar="HOST:PORT")
    ] = None
    process_count: Annotated[int, Flag("Number of processes.", metavar="N", min=1)] = 1
    process_index: Annotated[int, Flag("Index of this process.", metavar="I", min=0)] = 0


def start_devices(flags: DeviceFlags | None = None) -> None:
    """Sets up devices and processes, before anything uses them."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    from layouts import mesh

    mesh.cache_compilations()
    if flags is None:
        return
    if flags.simulate_devices is not None:
        mesh.simulate_devices(flags.simulate_devices)
    if isinstance(flags, ProcessFlags) and flags.process_count > 1:
        if flags.coordinator_address is None:
            raise UserError("--process_count without --coordinator_address.  Give HOST:PORT.")
        mesh.join_processes(flags.coordinator_address, flags.process_count, flags.process_index)
