"""Joins this process to the others of a run: by flags, by variables, or as the cluster says."""

import os
import re
import sys
from collections.abc import Mapping
from typing import Literal, NamedTuple

from configs.errors import RunError, UserError
from trainer.processes import peers
from trainer.processes.meeting import meet

Distributed = Literal["auto", "off", "manual"]

ALL_THREE = ("coordinator_address", "process_count", "process_index")
EXAMPLE = "--coordinator_address=HOST:PORT --process_count=N --process_index=I"


class ProcessId(NamedTuple):
    """Identifies this process among those of a run."""

    coordinator_address: str
    process_count: int
    process_index: int


def find_process_id(
    distributed: Distributed,
    coordinator_address: str | None = None,
    process_count: int | None = None,
    process_index: int | None = None,
    timeout_s: float = 300,
) -> ProcessId | None:
    """Returns what flags or the cluster say of this process; None where it runs alone.

    Flags win over the cluster.
    """
    given = dict(zip(ALL_THREE, (coordinator_address, process_count, process_index), strict=True))
    manual = {name: value for name, value in given.items() if value is not None}
    if distributed == "off" and manual:
        raise UserError(f"--distributed=off with {flags(manual)}.  Remove one of them.")
    if distributed == "off":
        return None
    is_manual = distributed == "manual" or manual
    process = process_id_by_flags(given) if is_manual else process_id_by_cluster(timeout_s)
    return process if process is not None and process.process_count > 1 else None


def flags(names: Mapping[str, object] | list[str]) -> str:
    return ", ".join(f"--{name}" for name in names)


def process_id_by_flags(given: Mapping[str, str | int | None]) -> ProcessId:
    """Returns what the flags say; raises if they contradict each other."""
    missing = [name for name, value in given.items() if value is None]
    if missing:
        raise UserError(
            f"{flags([name for name in given if name not in missing]) or '--distributed=manual'} "
            f"without {flags(missing)}.  Give all three: {EXAMPLE}, or their variables "
            f"MESHLOOM_{', MESHLOOM_'.join(name.upper() for name in ALL_THREE)}."
        )
    address, count, index = (given[name] for name in ALL_THREE)
    assert isinstance(address, str) and isinstance(count, int) and isinstance(index, int)
    match = re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[^\s:/\[\]]+):(\d{1,5})", address)
    if match is None or not 0 < int(match[2]) < 1 << 16:
        raise UserError(
            f"--coordinator_address={address}: legal is HOST:PORT of process 0, such as "
            "10.0.0.1:8476."
        )
    if not 0 <= index < count:
        raise UserError(
            f"--process_index={index} of --process_count={count}.  "
            f"Legal: {', '.join(map(str, range(count))) if count < 5 else f'0 to {count - 1}'}."
        )
    return ProcessId(address, count, index)


def process_id_by_cluster(timeout_s: float) -> ProcessId | None:
    """Returns what JAX knows of the cluster: TPU pods, GKE, SLURM and Open MPI."""
    from jax._src import clusters  # JAX offers this as part of `initialize` only

    try:
        address, count, index, _ = clusters.ClusterEnv.auto_detect_unset_distributed_params(
            None, None, None, None, None, int(timeout_s)
        )
    except Exception as error:  # each kind of cluster has errors of its kind
        raise UserError(
            f"--distributed=auto: the cluster does not say how to join its processes: {error}  "
            f"Give {EXAMPLE}, or --distributed=off to run alone."
        ) from None
    if address is None or count is None or index is None:
        return None
    return ProcessId(address, count, index)


def join(process: ProcessId, timeout_s: float) -> None:
    """Connects to the other processes, and JAX to theirs; gloo does collectives of CPUs."""
    import jax

    links = meet(*process, timeout_s)
    peers.set_current(peers.Peers(process.process_index, links))
    separate_output(process.process_index)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        jax.distributed.initialize(*process, initialization_timeout=int(timeout_s))
    except RuntimeError as error:
        raise RunError(f"JAX cannot connect to {process.coordinator_address}: {error}") from error


def separate_output(process_index: int) -> None:
    """Leaves the standard output to what process 0 prints as its result.

    The others print nothing there, and libraries of JAX such as gloo to the standard error.
    """
    sys.stdout.flush()
    output = os.dup(1) if process_index == 0 else os.open(os.devnull, os.O_WRONLY)
    sys.stdout = os.fdopen(output, "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors)
    os.dup2(2, 1)


def leave() -> None:
    """Waits until all processes are done, and disconnects; nothing where this one runs alone."""
    others = peers.current()
    if others is not None:
        import jax

        others.leave()
        peers.set_current(None)
        jax.distributed.shutdown()
