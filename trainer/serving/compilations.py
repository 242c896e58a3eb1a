"""Counts the programs that this process compiles."""

import threading

from jax import monitoring

EVENT = "/jax/core/compile/backend_compile_duration"


class Compilations:
    """Counts compilations, and loads of compiled programs from the cache, from now on."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.count = 0
        monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, duration_secs: float, **_: str | int) -> None:
        if event == EVENT:
            with self._lock:
                self.count += 1
