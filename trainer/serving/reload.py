"""Loads the weights of newer checkpoints into a running service."""

import dataclasses
import logging
import threading
from collections.abc import Callable

import jax

from configs.errors import UserError, brief
from trainer.checkpoints.restore import TrainedModel
from trainer.interrupts import not_finite
from trainer.serving.service import Service

logger = logging.getLogger(__name__)

TRIES = 3
"""How often an unreadable checkpoint is tried while its files stay the same."""


def check_finite(trained: TrainedModel) -> None:
    """Rejects weights that are NaN or infinite."""
    with jax.set_mesh(trained.mesh):
        bad = not_finite(trained.params)
    if bad:
        raise UserError(
            f"checkpoint {trained.step}: NaN or infinity in {brief(', '.join(bad))}.  Serve an "
            "earlier one: --checkpoint=STEP."
        )


@dataclasses.dataclass(eq=False)
class CheckpointWatcher:
    """Looks for a newer checkpoint every `every_s` seconds, in a thread.

    `files` describes a checkpoint's files, so one that is being copied is tried when complete.
    """

    service: Service
    latest: Callable[[], int | None]
    files: Callable[[int], object]
    restore: Callable[[int], TrainedModel]
    every_s: float

    def __post_init__(self) -> None:
        self._last = self.service.checkpoint
        self._seen: tuple[int, object] | None = None
        self._tries, self._problem = 0, ""  # of what was seen last
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="meshloom-reload", daemon=True)

    def look(self) -> None:
        """Restores the newest checkpoint unless it is the one in use."""
        step = self.latest()
        if step is None or step == self._last:
            return
        seen, before = (step, self.files(step)), self._seen
        if seen != before:
            self._seen, self._tries = seen, 0
            if before is not None and before[0] == step:
                return  # its files still change
        if self._tries == TRIES:
            return
        self._tries += 1
        trained = self.restore(step)
        self._last = step
        self.service.replace(trained.params, trained.step)

    def start(self) -> None:
        if self.every_s:
            self._thread.start()

    def stop(self) -> None:
        """Ends the thread, after any restore in progress."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(self.every_s):
            try:
                self.look()
            except Exception as error:
                if str(error) != self._problem:
                    logger.warning("Warning: the newest checkpoint is not served: %s", error)
                self._problem = str(error)
