"""Renders chats in a process of its own, because a model's template may be hostile."""

import asyncio
import functools
import json
import math
import multiprocessing
import resource
import signal
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from configs.errors import UserError
from data.tokenizers.chat_template import BadMessages, Messages, chat_template
from data.workers import compute_job, start_worker

LIMIT_S = 5  # of processor time, for a chat
LIMIT_BYTES = 2**30  # of memory, beyond what the process starts with
LIMIT_CHARACTERS = 1_000_000  # of a text, beyond its messages and variables
TOO_MUCH = f"it takes more than {LIMIT_S} s, 1 GiB or {LIMIT_CHARACTERS:,} characters"


class ChatRenderer:
    """Renders messages like `ChatTemplate.render`, within limits, one chat at a time."""

    def __init__(self, files: Mapping[str, str], end: str):
        """Raises `UserError` for a template that cannot be read."""
        self.turn, self.waiting = asyncio.Lock(), 0
        self._start = functools.partial(limited, files, end)
        self._pool: ProcessPoolExecutor | None = None
        try:
            self.render(None)
        except BadMessages as error:
            raise UserError(f"chat template: {error}.") from None

    def render(self, messages: Messages | None, variables: Mapping[str, Any] | None = None) -> str:
        """Returns the text of a chat; "" if messages is None.

        Raises `BadMessages` if the template refuses the chat, or exceeds a limit.
        """
        for _ in range(2):
            begin_s = time.monotonic()
            if self._pool is None:
                spawn = multiprocessing.get_context("spawn")
                self._pool = ProcessPoolExecutor(1, spawn, start_worker, (self._start,))
            try:
                return self._pool.submit(compute_job, messages, variables).result()
            except BrokenProcessPool:
                self._pool = None
            if time.monotonic() - begin_s > LIMIT_S:  # otherwise something else ended the process
                break
        raise BadMessages(TOO_MUCH)


def limited(files: Mapping[str, str], end: str) -> Callable[..., str]:
    """Limits this process's memory, and returns a function that renders a chat in limited time."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it ends when the server does
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if (pages := Path("/proc/self/statm")).exists():
        size = int(pages.read_text().split()[0]) * resource.getpagesize()
        limit(resource.RLIMIT_AS, size + LIMIT_BYTES)
    limit(resource.RLIMIT_CPU, math.ceil(time.process_time()) + LIMIT_S)
    template = chat_template(files, end)

    def render(messages: Messages | None, variables: Mapping[str, Any] | None) -> str:
        if template is None or messages is None:
            return ""
        limit(resource.RLIMIT_CPU, math.ceil(time.process_time()) + LIMIT_S)
        text = template.render(messages, variables)
        if len(text) > LIMIT_CHARACTERS + len(json.dumps([messages, variables])):
            raise BadMessages(TOO_MUCH)
        return text

    return render


def limit(kind: int, value: int) -> None:
    """Sets the soft limit of a resource: beyond it, the kernel ends or refuses this process."""
    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))
