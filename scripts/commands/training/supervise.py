"""Runs `meshloom supervise`: restarts a command that fails."""

import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from types import FrameType

from configs.errors import UserError
from configs.paths import path_of
from scripts.commands.training.flags import SuperviseFlags
from scripts.terminal import print_note
from trainer.metrics.jsonl import read_lines
from trainer.processes.ending import FAILED, STALLED, STOPS, handle
from trainer.resume.history import FILE

RESTARTED = (FAILED, STALLED)
FAILURES = 3
"""Failures at the same step, after which another start would fail as well."""
LONGEST_S = 300.0


def supervise(flags: SuperviseFlags) -> None:
    """Runs the command until it succeeds, is stopped, or keeps failing at the same step."""
    if not flags.command:
        raise UserError("no command.  Give one, as in: meshloom supervise -- meshloom train …")
    failures, last_step = 0, -1
    while True:
        code, is_stopped = run(flags.command)
        is_killed = code < 0 and -code not in STOPS  # such as for lack of memory
        code = 128 - code if code < 0 else code  # as a shell reports it
        if is_stopped or not (code in RESTARTED or is_killed):
            sys.exit(code)
        step = newest_step(flags.command)
        failures, last_step = (failures + 1 if step == last_step else 1), step
        at = f"after step {step}" if step else "before the first checkpoint"
        if failures == FAILURES:
            print_note(f"Failed {FAILURES} times {at}: not restarting.")
            sys.exit(code)
        wait_s = min(LONGEST_S, flags.backoff_s * 2 ** (failures - 1))
        print_note(f"Exit code {code} {at}; restarting in {wait_s:g} s.")
        time.sleep(wait_s)


def run(command: Sequence[str]) -> tuple[int, bool]:
    """Runs the command and forwards signals; returns its exit code, and whether a signal came."""
    received, early = list[int](), list[int]()
    process: subprocess.Popen[bytes] | None = None

    def forward(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if process is None:
            early.append(number)
        else:
            process.send_signal(number)

    before = {number: handle(number, forward) for number in STOPS}
    try:
        # In its own group, or it would get Ctrl-C twice: the second one saves nothing.
        process = subprocess.Popen(command, process_group=0)
        for number in early:
            process.send_signal(number)
        code = process.wait()
    except OSError as error:
        raise UserError(f"{command[0]}: {error.strerror}.") from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return code, bool(received)


def newest_step(command: Sequence[str]) -> int:
    """Returns the newest step from which the command's model directory continues.

    This is a checkpoint, or the local one that the last start resumed from; 0 if there is neither.
    """
    match = re.search(r"(?:^|\0)--model_dir[=\0]([^\0]+)", "\0".join(command))
    if match is None:
        return 0
    folder = path_of(match[1])
    names = [path.name for path in folder.glob("checkpoints/*")]
    starts = [line["step"] for line in read_lines(folder / FILE)[-1:]]
    return max([*starts, *(int(name) for name in names if name.isdecimal())], default=0)
