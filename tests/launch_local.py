"""Starts N processes of a command on this machine, joined as one run.

    python -m tests.launch_local 2 -- meshloom train --model_dir=runs/two --gin_file=...

The output of each process except 0 is prefixed with its index.  Exits with the first exit code
that is not 0.
"""

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import IO

from trainer.processes.ending import STOPS, handle


def main() -> None:
    match sys.argv[1:]:
        case [count, "--", *command] if count.isdecimal() and int(count) and command:
            sys.exit(launch(int(count), command))
        case _:
            sys.stderr.write("Usage: python -m tests.launch_local N -- COMMAND\n")
            sys.exit(2)


def launch(count: int, command: Sequence[str]) -> int:
    """Runs the processes; returns the exit code of all."""
    address = f"localhost:{free_port()}"
    processes = [start(command, address, count, index) for index in range(count)]

    def echo(index: int, stream: IO[bytes]) -> None:
        for line in stream:
            sys.stderr.buffer.write(b"[%d] %s" % (index, line))
            sys.stderr.buffer.flush()

    def forward(number: int, frame: object) -> None:
        for process in processes:
            process.send_signal(number)

    for number in STOPS:  # this process ends when the others do
        handle(number, forward)
    echoes = [
        threading.Thread(target=echo, args=(index, stream))
        for index, process in enumerate(processes)
        for stream in (process.stdout, process.stderr)
        if stream is not None
    ]
    for thread in echoes:
        thread.start()
    codes = [process.wait() for process in processes]
    for thread in echoes:
        thread.join()
    return next((128 - code if code < 0 else code for code in codes if code), 0)


def start(
    command: Sequence[str], address: str, count: int, index: int
) -> "subprocess.Popen[bytes]":
    """Starts one process, whose environment says which one of the run it is."""
    variables = {
        "MESHLOOM_DISTRIBUTED": "manual",
        "MESHLOOM_COORDINATOR_ADDRESS": address,
        "MESHLOOM_PROCESS_COUNT": str(count),
        "MESHLOOM_PROCESS_INDEX": str(index),
    }
    output = None if index == 0 else subprocess.PIPE
    try:
        # In a group of its own, or it would get Ctrl-C twice: the second one saves nothing.
        return subprocess.Popen(
            command, env=os.environ | variables, stdout=output, stderr=output, process_group=0
        )
    except OSError as error:
        sys.stderr.write(f"{command[0]}: {error.strerror}\n")
        sys.exit(2)


def free_port() -> int:
    """Returns a port that is free now."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    main()
