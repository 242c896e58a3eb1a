"""Defines the trackers that receive a run's numbers: TensorBoard, Weights & Biases.

The package of a service is optional, and imported only if a run names the service.
"""

import abc
import dataclasses
import importlib.util
import logging
import queue
import threading
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from configs.errors import UserError
from configs.spec import abstract_spec, spec
from data.storage.files import atomic_write

WANDB_ID = "wandb.id"
CLOSE_S = 60.0
"""Seconds that a run waits at its end for a service to receive the remaining numbers."""

logger = logging.getLogger(__name__)

Numbers = Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class TrackedRun:
    """Describes a run to a tracker."""

    folder: Path
    """Local folder of the run's files."""
    name: str
    first_step: int
    """Updates before this start; 0 in a new run."""
    settings: Mapping[str, Any]
    """Value of each setting, by its name in gin files."""


class Tracker:
    """Receives the numbers of a run."""

    def log(self, step: int, numbers: Numbers) -> None:
        """Records numbers of a step, by names such as "train/loss"."""
        raise NotImplementedError(f"{type(self).__name__} has no log")

    def flush(self) -> None:
        """Writes pending numbers before a checkpoint is saved; no save waits for a service."""

    def close(self, *, succeeded: bool) -> None:
        """Ends the tracked run."""
        raise NotImplementedError(f"{type(self).__name__} has no close")


@abstract_spec
class TrackerSpec(abc.ABC):
    """Selects what a run's numbers are sent to."""

    PACKAGE: ClassVar[str]
    ID_FILE: ClassVar[str | None] = None
    """File of the model directory that keeps the run's id at the service."""

    def check(self) -> None:
        """Rejects a service whose package is not installed."""
        if importlib.util.find_spec(self.PACKAGE) is None:
            name = type(self).__name__
            raise UserError(
                f"Run.trackers: @{name}() needs the package {self.PACKAGE}, which is not "
                f"installed.  Install it: pip install {self.PACKAGE}, or remove @{name}()."
            )

    @abc.abstractmethod
    def open(self, run: TrackedRun) -> Tracker:
        """Returns the tracker of a run that starts or continues."""


@spec
class TensorBoard(TrackerSpec):
    """Writes TensorBoard event files to events/ in the model directory."""

    PACKAGE = "tensorboardX"

    def open(self, run: TrackedRun) -> Tracker:
        return EventFiles(run)


@spec
class WandB(TrackerSpec):
    """Sends metrics and settings to Weights & Biases (`pip install -e '.[wandb]'`).

    The key comes from `wandb login` or WANDB_API_KEY.  With WANDB_MODE=offline it only writes to
    wandb/ in the model directory, for `wandb sync`.
    """

    PACKAGE, ID_FILE = "wandb", WANDB_ID

    project: str = "meshloom"
    """Project of the run."""
    entity: str | None = None
    """User or team of the project. None: the default for the account."""
    name: str | None = None
    """Name of the run. None: the name of the model directory."""

    def open(self, run: TrackedRun) -> Tracker:
        return Background("WandB", lambda: WandBRun(self, run))


class EventFiles(Tracker):
    """Writes TensorBoard events."""

    def __init__(self, run: TrackedRun):
        from tensorboardX import SummaryWriter  # imports PyTorch if it is installed: seconds

        # TensorBoard hides this step and later ones in earlier files.
        hidden = run.first_step + 1 if run.first_step else None
        self._events = SummaryWriter(str(run.folder / "events"), purge_step=hidden, flush_secs=10)

    def log(self, step: int, numbers: Numbers) -> None:
        for name, number in numbers.items():
            self._events.add_scalar(name, number, step)

    def flush(self) -> None:
        self._events.flush()

    def close(self, *, succeeded: bool) -> None:
        self._events.close()


class Background(Tracker):
    """Calls a service in a thread, so a slow one delays no step, and a failing one ends no run.

    After the first error, which is logged, the service receives nothing more.
    """

    def __init__(self, name: str, connect: Callable[[], Tracker]):
        self._name = name
        self._waiting: queue.SimpleQueue[Callable[[Tracker], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, args=(connect,), daemon=True)
        self._thread.start()

    def log(self, step: int, numbers: Numbers) -> None:
        if self._thread.is_alive():
            self._waiting.put(lambda tracker: tracker.log(step, numbers))

    def close(self, *, succeeded: bool) -> None:
        self._waiting.put(lambda tracker: tracker.close(succeeded=succeeded))
        self._waiting.put(None)
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            self._warn(f"no answer within {CLOSE_S:.0f} s")

    def _work(self, connect: Callable[[], Tracker]) -> None:
        try:
            tracker = connect()
            for call in iter(self._waiting.get, None):
                call(tracker)
        except Exception as error:  # services raise anything
            self._warn(f"{type(error).__name__}: {error}")

    def _warn(self, what: str) -> None:
        logger.warning("%s: %s.  The run continues; metrics.jsonl is complete.", self._name, what)


class WandBRun(Tracker):
    """Logs to a Weights & Biases run: a new one, or the one of the model directory."""

    def __init__(self, spec: WandB, run: TrackedRun):
        import wandb

        self._run = wandb.init(
            project=spec.project,
            entity=spec.entity,
            name=spec.name or run.name,
            config={**run.settings},
            id=known_id(run.folder / WANDB_ID, lambda: uuid.uuid4().hex),
            resume="allow",
            dir=str(run.folder),
        )

    def log(self, step: int, numbers: Numbers) -> None:
        # A resumed run repeats the steps after its checkpoint; the service rejects those it has.
        if step >= self._run.step:
            self._run.log({**numbers}, step=step)

    def close(self, *, succeeded: bool) -> None:
        self._run.finish(exit_code=0 if succeeded else 1)


def known_id(path: Path, make: Callable[[], str]) -> str:
    """Returns the id in a file, or makes one and stores it there."""
    if path.exists():
        return path.read_text(encoding="utf-8").strip()
    made = make()
    atomic_write(path, made + "\n")
    return made
