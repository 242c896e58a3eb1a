"""Counts the programs that this process compiles, and the time that takes."""

import threading

from jax import monitoring

EVENT = "/jax/core/compile/backend_compile_duration"
EVENTS = "/jax/core/compile/"
"""Begins the names of all parts of a compilation: tracing and lowering, too."""


class Compilations:
    """Counts compilations, and loads of compiled programs from the cache, from now on."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.count = 0
        self.seconds = 0.0
        monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, duration_secs: float, **_: str | int) -> None:
        if event.startswith(EVENTS):
            with self._lock:
                self.count += event == EVENT
                self.seconds += duration_secs
