"""Connects this process to the others of a run, given by flags, by variables or by the cluster."""

import contextlib
import logging
import os
import re
import selectors
import socket
import sys
import time
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from configs.errors import RunError, UserError
from trainer.processes import peers
from trainer.processes.peers import Link, join_names

logger = logging.getLogger(__name__)

GREETING = "meshloom 1"
POLL_S = 0.2
LOG_EVERY_S = 10.0
CONNECT_EVERY_S = 0.5


def meet(address: str, count: int, index: int, timeout_s: float) -> dict[int, Link]:
    """Returns the links of this process, once all processes of the run have connected."""
    if index == 0:
        return Hub(address, count, timeout_s).wait_for_all()
    return {0: reach_hub(address, count, index, timeout_s)}


class Hub:
    """Waits at the address of process 0 for all other processes."""

    def __init__(self, address: str, count: int, timeout_s: float):
        self._address, self._count, self._timeout_s = address, count, timeout_s
        self._links: dict[int, Link] = {}

    def wait_for_all(self) -> dict[int, Link]:
        start = logged = time.monotonic()
        with self._listen() as server, selectors.DefaultSelector() as selector:
            selector.register(server, selectors.EVENT_READ)
            while self._missing:
                for key, _ in selector.select(POLL_S):
                    if key.fileobj is server:
                        with contextlib.suppress(OSError):  # a probe that is gone again
                            link = Link(server.accept()[0])
                            selector.register(link.connection, selectors.EVENT_READ, link)
                    elif not self._greet(key.data):
                        selector.unregister(key.fileobj)
                now = time.monotonic()
                if now - start > self._timeout_s:
                    hosts = (f"{i} ({link.host})" for i, link in sorted(self._links.items()))
                    line = (
                        f"{join_names(self._missing)} of {self._count} did not connect to "
                        f"{self._address} within {self._timeout_s:g} s.  Connected: "
                        f"{', '.join(['0 (this host)', *hosts])}.  Read the logs of the missing "
                        "ones; --start_timeout_s waits longer."
                    )
                    raise RunError(self._send_all("end", line))
                if now - logged > LOG_EVERY_S:
                    missing = join_names(self._missing)
                    line = f"Waiting for {missing} of {self._count} at {self._address}."
                    logger.info(self._send_all("waiting", line))
                    logged = now
        for link in self._links.values():
            link.send(["ready", socket.gethostname()])
        return self._links

    def _listen(self) -> socket.socket:
        port = int(self._address.rpartition(":")[2])
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        try:
            return socket.create_server(("", port), family=family, dualstack_ipv6=dual)
        except OSError as error:
            raise RunError(
                f"process 0 cannot listen at {self._address}: {error.strerror}.  "
                "Choose another port in --coordinator_address, for all processes."
            ) from None

    @property
    def _missing(self) -> set[int]:
        return set(range(1, self._count)) - set(self._links)

    def _greet(self, link: Link) -> bool:
        """Admits a process that identifies itself; returns whether to keep listening to it."""
        try:
            if (messages := link.receive()) is None:
                raise EOFError
            if any(greeting != GREETING for greeting, _, _, _ in messages):
                raise ValueError
        except (ValueError, TypeError, EOFError, RecursionError):  # it left, or is of no run
            for index in [index for index, other in self._links.items() if other is link]:
                del self._links[index]
                logger.info("Process %d left before the run started.", index)
            link.connection.close()
            return False
        for _, index, count, link.host in messages:
            if count != self._count:
                self._refuse(link, f"process {index} on {link.host} was started with "
                             f"--process_count={count}, process 0 with {self._count}.")  # fmt: skip
            if index in self._links:
                self._refuse(link, f"--process_index={index} was given to two processes, on "
                             f"{self._links[index].host} and on {link.host}.")  # fmt: skip
            self._links[index] = link
        return True

    def _refuse(self, link: Link, line: str) -> None:
        link.send(["refused", line])
        raise UserError(self._send_all("refused", line))

    def _send_all(self, kind: str, line: str) -> str:
        for link in self._links.values():
            link.send([kind, line])
        return line


def reach_hub(address: str, count: int, index: int, timeout_s: float) -> Link:
    """Connects to process 0, identifies this process, and waits until all have connected."""
    host, _, port = address.rpartition(":")
    start = logged = time.monotonic()
    reason = "no answer"
    while (left := start + timeout_s - time.monotonic()) > 0:
        try:
            peer = (host.strip("[]"), int(port))
            link = Link(socket.create_connection(peer, timeout=min(left, LOG_EVERY_S)))
            with contextlib.ExitStack() as stack:
                stack.callback(link.connection.close)
                link.send([GREETING, index, count, socket.gethostname()])
                if _wait_until_ready(link, start + timeout_s + LOG_EVERY_S):
                    stack.pop_all()
                    return link
            reason = "it closed the connection"
        except OSError as error:
            reason = error.strerror or str(error)
        except UserError:  # a refusal by process 0, which is also a ValueError
            raise
        except (ValueError, TypeError, LookupError, RecursionError):
            reason = "another program answers there"
        if time.monotonic() - logged > LOG_EVERY_S:
            logger.info("Waiting for process 0 at %s (%s).", address, reason)
            logged = time.monotonic()
        time.sleep(CONNECT_EVERY_S)
    raise RunError(
        f"process 0 did not open {address} within {timeout_s:g} s ({reason}).  Read its "
        "log, check --coordinator_address, or raise --start_timeout_s."
    )


def _wait_until_ready(link: Link, until: float) -> bool:
    """Returns whether all processes have connected; raises the error that process 0 sends."""
    while (left := until - time.monotonic()) > 0:
        link.connection.settimeout(left)
        if (messages := link.receive()) is None:
            break
        for number, (kind, *values) in enumerate(messages, 1):
            if kind == "ready":
                link.unread = messages[number:]
                link.connection.settimeout(None)
                link.host = values[0]
                return True
            if kind == "waiting":
                logger.info(values[0])
            elif kind == "refused":
                raise UserError(values[0])
            elif kind == "end":
                raise RunError(values[0])
    return False


Distributed = Literal["auto", "off", "manual"]

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
    """Returns this process's id according to flags or the cluster; None if it runs alone.

    Flags take precedence over the cluster.
    """
    values = (coordinator_address, process_count, process_index)
    given = dict(zip(ProcessId._fields, values, strict=True))
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


def process_id_by_flags(given: Mapping[str, Any]) -> ProcessId:
    """Returns the id that the flags give; raises if they contradict each other."""
    if missing := [name for name, value in given.items() if value is None]:
        raise UserError(
            f"{flags([name for name in given if name not in missing]) or '--distributed=manual'} "
            f"without {flags(missing)}.  Give all three: {EXAMPLE}, or their variables "
            f"MESHLOOM_{', MESHLOOM_'.join(name.upper() for name in given)}."
        )
    address, count, index = process = ProcessId(**given)
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
    return process


def process_id_by_cluster(timeout_s: float) -> ProcessId | None:
    """Returns the id that JAX detects in a cluster: TPU pods, GKE, SLURM and Open MPI."""
    from jax._src import clusters  # JAX offers this as part of `initialize` only

    try:
        address, count, index, _ = clusters.ClusterEnv.auto_detect_unset_distributed_params(
            None, None, None, None, None, int(timeout_s)
        )
    except Exception as error:  # each kind of cluster raises other errors
        raise UserError(
            f"--distributed=auto: the cluster does not say how to join its processes: {error}  "
            f"Give {EXAMPLE}, or --distributed=off to run alone."
        ) from None
    if address is None or count is None or index is None:
        return None
    return ProcessId(address, count, index)


def join(process: ProcessId, timeout_s: float) -> None:
    """Connects to the other processes, and initializes JAX for all; CPUs use gloo."""
    import jax

    peers.set_current(peers.Peers(process.process_index, meet(*process, timeout_s)))
    # Standard output is for the result that process 0 prints.  Other processes print nothing
    # there, and libraries of JAX such as gloo print to standard error.
    sys.stdout.flush()
    output = os.dup(1) if process.process_index == 0 else os.open(os.devnull, os.O_WRONLY)
    sys.stdout = os.fdopen(output, "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors)
    os.dup2(2, 1)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # Under SLURM and Open MPI, JAX would use a single GPU, as with one process per GPU.
    names = ("SLURM_STEP_TASKS_PER_NODE", "OMPI_COMM_WORLD_LOCAL_SIZE")
    counts = [os.environ.get(name, "") for name in names]  # of processes on each host
    is_alone = any(re.fullmatch(r"1(\(x\d+\))?", count) for count in counts)
    detection = "deactivate" if is_alone else None
    try:
        jax.distributed.initialize(
            *process, cluster_detection_method=detection, initialization_timeout=int(timeout_s)
        )
    except RuntimeError as error:
        raise RunError(f"JAX cannot connect to {process.coordinator_address}: {error}") from error


def leave() -> None:
    """Waits until all processes are done, and disconnects; does nothing if this one runs alone."""
    if (others := peers.current()) is not None:
        import jax

        others.leave()
        peers.set_current(None)
        jax.distributed.shutdown()
