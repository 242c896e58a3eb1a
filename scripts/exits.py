"""Ends a command: its exit code, its last line, and the message to the other processes."""

import contextlib
import errno
import os
import re
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import click

from configs.errors import RunError, UserError, brief
from data.storage import remote
from data.storage.files import FULL, describe_full
from trainer.processes import keyboard, peers
from trainer.processes.ending import FAILED, INTERRUPTED, end_process
from trainer.processes.join import leave

USAGE = 2
BROKEN_PIPE = 141  # as if SIGPIPE ended the program
WRONG_NAME = (errno.ENAMETOOLONG, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EACCES,
              errno.EPERM, errno.EROFS, errno.ELOOP)  # fmt: skip
"""Errors about a file's name or folder, which are mistakes by the user."""
LOSS_S = 5.0
"""Seconds that an unexpected error waits for the news that another process is lost."""


def exits(call: Callable[[], object]) -> NoReturn:
    """Calls and exits: with 0 for success, 2 for bad usage or input, and 1 for a failed run.

    Reports a failure to the other processes of a run; otherwise waits for them.
    """
    try:
        call()
        sys.stdout.flush()
        leave()
    except SystemExit:
        raise
    except BaseException as error:
        others = peers.current()
        code, line = report(error)
        if others is not None:
            others.fail(code, line)
        elif code != INTERRUPTED:
            sys.exit(code)
        end_process(code)
    keyboard.stop_listening()
    sys.exit(0)


def report(error: BaseException) -> tuple[int, str]:
    """Prints what went wrong; returns the exit code and the line."""
    if keyboard.is_interrupted() or isinstance(error, click.Abort | KeyboardInterrupt):
        return INTERRUPTED, "Ctrl-C"
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        error.show()
        return USAGE, "no command"
    if isinstance(error, click.ClickException):
        context = getattr(error, "ctx", None)
        hint = f"  See {context.command_path} --help." if context else ""
        return USAGE, print_error(error.format_message() + hint)
    if isinstance(error, UserError | RunError):
        return USAGE if isinstance(error, UserError) else FAILED, print_error(str(error))
    if memory := out_of_memory(error):
        return USAGE, print_error(memory)
    if problem := remote.failure(error):
        return FAILED, print_error(problem)
    if peers.current() is not None:  # if another process is lost, this one is ended meanwhile
        time.sleep(LOSS_S)
    if isinstance(error, OSError):
        # Drops unwritten standard output, or Python would try again at exit.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            return BROKEN_PIPE, "the standard output is closed"
        name = f"{error.filename}: " if error.filename else ""
        code = USAGE if error.errno in WRONG_NAME else FAILED
        is_full = error.errno in FULL and error.filename
        reason = describe_full(Path(error.filename), error) if is_full else error.strerror
        return code, print_error(f"{name}{reason or error}.")
    traceback.print_exception(error)
    return FAILED, traceback.format_exception_only(error)[-1].strip()


def out_of_memory(error: BaseException) -> str | None:
    """Describes how much memory is missing; returns None for other errors."""
    exhausted = re.search("RESOURCE_EXHAUSTED|Out of memory", str(error))  # as XLA reports it
    if not exhausted and not isinstance(error, MemoryError):
        return None
    match = re.search(r"(\d+) ?bytes|Unable to allocate ([\d.]+ \w+)", str(error))
    size = match and (match[2] or f"{int(match[1]):,} bytes")
    needed = f": {size} more are needed" if size else ""
    return (
        f"out of memory{needed}.  Choose a smaller batch, beam or model, or more devices; "
        "`meshloom plan` says what fits."
    )


def print_error(line: str) -> str:
    """Prints an error line to the standard error, and returns it."""
    click.echo(f"meshloom: {escape(line)}", err=True)
    return escape(line)


def escape(message: str) -> str:
    """Escapes control characters and shortens lines, which may hold any input."""
    message = re.sub(r"\n(?!  )", r"\\n", message)  # in a value: our own further lines are indented
    lines = message.split("\n")
    escaped = (re.sub(r"[\x00-\x1f\x7f-\x9f]", lambda x: repr(x[0])[1:-1], line) for line in lines)
    return "\n".join(brief(line, 3_000) for line in escaped)
