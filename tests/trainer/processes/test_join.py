"""How a process finds its place: by flags, by variables, from SLURM and from Open MPI."""

import contextlib
import errno
import os
import random
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from configs.errors import UserError
from tests.toys import ROOT
from trainer.processes import join
from trainer.processes.join import ProcessId, find_process_id
from trainer.processes.peers import Link

SLURM = {
    "SLURM_JOB_ID": "10",
    "SLURM_STEP_NODELIST": "node[3-6],other",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
}
FIRST_PORT = 65536 - 4096
"""JAX takes this port and the number of the job, of 4,096."""
OPEN_MPI = {
    "OMPI_MCA_orte_hnp_uri": "1314521088.0;tcp://10.96.0.1,10.148.0.1:34911",
    "OMPI_COMM_WORLD_SIZE": "3",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
}


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        ({}, None),
        (SLURM, ProcessId("node3:61450", 4, 2)),
        (SLURM | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, None),
        (OPEN_MPI, ProcessId("10.96.0.1:62880", 3, 1)),
    ],
)
def test_the_cluster_tells_the_place(
    variables: dict[str, str], place: ProcessId | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert find_process_id("auto") == place
    assert find_process_id("off") is None


def test_flags_win_over_the_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    place = ProcessId("[::1]:8476", 2, 0)
    assert find_process_id("auto", *place) == find_process_id("manual", *place) == place
    assert find_process_id("manual", "host:8476", 1, 0) is None


def test_a_cluster_that_does_not_say_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (SLURM | {"SLURM_NTASKS": "many"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=r"--distributed=auto: .*'many'.*--distributed=off"):
        find_process_id("auto")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("manual",), "--distributed=manual without --coordinator_address, --process_count, --pr"),
        (("auto", "host:1"), "--coordinator_address without --process_count, --process_index."),
        (("auto", None, 2), "--process_count without --coordinator_address, --process_index."),
        (("auto", "host:1", None, 1), "--coordinator_address, --process_index without --process_c"),
        (("off", "host:1"), "--distributed=off with --coordinator_address."),
        (("auto", "host:1", 2, 5), "--process_index=5 of --process_count=2.  Legal: 0, 1."),
        (("auto", "host:1", 20, 20), "--process_index=20 of --process_count=20.  Legal: 0 to 19."),
        (("auto", "garbage", 2, 1), "--coordinator_address=garbage: legal is HOST:PORT"),
        (("auto", "host:0", 2, 1), "--coordinator_address=host:0: legal is HOST:PORT"),
        (("auto", "host:70000", 2, 1), "--coordinator_address=host:70000: legal is"),
        (("auto", "http://host:80", 2, 1), "--coordinator_address=http://host:80: legal is"),
    ],
)
def test_flags_that_contradict_are_refused(flags: tuple[Any, ...], message: str) -> None:
    with pytest.raises(UserError) as error:
        find_process_id(*flags)
    assert str(error.value).startswith(message)


JOINS = """
from scripts.devices import ProcessFlags, start_devices
start_devices(ProcessFlags(simulate_devices=2, start_timeout_s=120))
import jax, sys
gpus = jax.config.values["jax_cuda_visible_devices"]
print(jax.process_index(), jax.process_count(), jax.device_count(), gpus, file=sys.stderr)
print("result")
from trainer.processes.join import leave
leave()
"""


def is_free(port: int) -> bool:
    with socket.socket() as probe, contextlib.suppress(OSError):
        probe.bind(("localhost", port))
        return True
    return False


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.faults)])
def test_tasks_of_slurm_join(count: int) -> None:
    number = next(n for n in random.sample(range(4096), 4096) if is_free(FIRST_PORT + n))
    job = SLURM | {
        "SLURM_JOB_ID": str(number),
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_NTASKS": str(count),
    }
    # JAX gives one GPU to process 0, as to one of several on a host, and all to the others.
    tasks = [str(count), *[f"1(x{count})"] * (count - 1)]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", JOINS], cwd=ROOT, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env=os.environ
            | job
            | {"SLURM_PROCID": str(index), "SLURM_STEP_TASKS_PER_NODE": tasks[index]},
        )
        for index in range(count)
    ]  # fmt: skip
    outputs, errors = zip(*(process.communicate(timeout=180) for process in processes), strict=True)
    assert [process.returncode for process in processes] == [0] * count
    assert outputs == ("result\n", *[""] * (count - 1))
    ends = [error.splitlines()[-1] for error in errors]
    gpus = ["0", *["all"] * (count - 1)]
    assert ends == [f"{index} {count} {2 * count} {gpus[index]}" for index in range(count)]


def test_a_connection_that_is_reset_before_it_is_accepted_ends_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As that of a port scan; the others still join."""
    port = next(n for n in random.sample(range(20_000, 30_000), 9999) if is_free(n))
    reset = threading.Event()

    def no_peer(connection: socket.socket) -> Link:
        connection.close()
        reset.set()
        raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")

    with ThreadPoolExecutor() as pool:
        monkeypatch.setattr(join, "Link", no_peer)
        joined = pool.submit(join.Hub(f"localhost:{port}", 2, 60).wait_for_all)
        while not reset.wait(0.1) and not joined.done():
            with contextlib.suppress(OSError):  # it does not listen yet
                socket.create_connection(("localhost", port)).close()
        monkeypatch.setattr(join, "Link", Link)
        other = join.reach_hub(f"localhost:{port}", 2, 1, 60)
        links = joined.result()
    assert list(links) == [1]
    for link in (other, *links.values()):
        link.connection.close()
