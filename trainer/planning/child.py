"""Calls functions in a child process, so an abort of the TPU compiler ends no command."""

import functools
import multiprocessing
import os
import re
import signal
import tempfile
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, ParamSpec, TypeVar

import jax

from configs.errors import RunError, UserError, brief
from data.workers import end_with_parent

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
FATAL = re.compile(r"^(?:F\d{4} [^\]\n]*\] |(?=\w+\(\): ))(.*)", re.M)  # of XLA, or malloc(): ...


class CompilerAborted(UserError):
    """Reports that the compiler aborts its process."""


def in_child(
    function: Callable[Parameters, Result], *args: Parameters.args, **kwargs: Parameters.kwargs
) -> Result:
    """Calls a function in a new process, which has only CPU devices, and returns its result.

    Arguments and result are pickled.  Raises the errors of the function, and `CompilerAborted` if
    the process ends without an answer.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    with receiver, tempfile.NamedTemporaryFile(mode="r", errors="replace") as log:
        arguments = (sender, log.name, functools.partial(function, *args, **kwargs))
        process = context.Process(target=_answer, args=arguments, daemon=True)
        process.start()
        sender.close()
        try:
            error, answer = receiver.recv()
        except EOFError:
            process.join()
            raise CompilerAborted(describe_abort(process.exitcode, log.read())) from None
        finally:
            process.kill()
            process.join()
    if error is not None:
        raise error(answer)
    return answer


def describe_abort(exit_code: int | None, log: str) -> str:
    """Explains in one line how a process ended."""
    name = f"exit code {exit_code}"
    if exit_code is not None and exit_code < 0:
        name = signal.Signals(-exit_code).name
    if exit_code == -signal.SIGKILL:
        name += ", as where memory is short"
    reasons = FATAL.findall(log)
    reason = f": {brief(reasons[-1].strip(), 300)}" if reasons else "."
    return (
        f"the compiler aborts ({name}){reason}  "
        "Choose another slice, layout or batch, or add --analytic."
    )


def _answer(sender: Connection, log: str, call: Callable[[], Any]) -> None:
    """Sends an error's class and text, or None and the result of the call."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    threading.Thread(target=end_with_parent, daemon=True).start()
    os.dup2(os.open(log, os.O_WRONLY), 2)
    jax.config.update("jax_platforms", "cpu")  # those of this machine may be in use
    try:
        sender.send((None, call()))
    except (UserError, RunError) as error:
        sender.send((UserError if isinstance(error, UserError) else RunError, str(error)))
    except Exception:
        sender.send((RuntimeError, traceback.format_exc()))
