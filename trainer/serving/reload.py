"""Brings the weights of newer checkpoints into a running service."""

import logging
import threading
from collections import Counter
from collections.abc import Callable

from trainer.serving.service import ServedWeights, Service

logger = logging.getLogger(__name__)


TRIES = 3
"""How often a checkpoint that cannot be read is tried."""


class CheckpointWatcher:
    """Looks for a newer checkpoint every so many seconds, in a thread."""

    def __init__(
        self,
        service: Service,
        latest: Callable[[], int | None],
        restore: Callable[[int], ServedWeights],
        every_s: float,
    ):
        self.service, self.latest, self.restore, self.every_s = service, latest, restore, every_s
        self._last = service.checkpoint
        self._tries = Counter[int]()  # by checkpoint, since the last that could be read
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="meshloom-reload", daemon=True)

    def look(self) -> None:
        """Restores the newest checkpoint if it is another one than last time."""
        step = self.latest()
        if step is None or step == self._last or self._tries[step] == TRIES:
            return
        self._tries[step] += 1
        weights = self.restore(step)
        self._last = step
        self._tries.clear()
        self.service.replace(weights)

    def start(self) -> None:
        if self.every_s:
            self._thread.start()

    def stop(self) -> None:
        """Ends the thread, after what it reads."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(self.every_s):
            try:
                self.look()
            except Exception as error:
                logger.warning("Warning: the newest checkpoint cannot be read: %s", error)
