"""Times training steps, and how long they wait for data."""

import contextlib
import dataclasses
import time
from collections.abc import Iterator


@dataclasses.dataclass
class StepTimer:
    """Seconds between steps, and seconds spent waiting for data.

    The first step compiles; it is in no total.
    """

    steps: int = 0
    total_s: float = 0.0
    waited_s: float = 0.0
    last: float = dataclasses.field(default_factory=time.perf_counter)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Counts the time within as waiting for data."""
        before = time.perf_counter()
        yield
        self.waited_s += time.perf_counter() - before

    def restart(self) -> None:
        """Leaves the time since the last step out."""
        self.last = time.perf_counter()

    def rates(self, tokens: float) -> dict[str, float | None]:
        """Returns the rates of the step that ends now."""
        now = time.perf_counter()
        step_s, self.last = now - self.last, now
        if self.steps:
            self.total_s += step_s
        else:
            self.waited_s = 0.0
        self.steps += 1
        return {
            "tokens_per_s": tokens / step_s,
            "step_s": step_s,
            "data_stall_fraction": self.data_stall_fraction,
        }

    @property
    def step_s(self) -> float | None:
        """Returns the mean seconds of a step."""
        return self.total_s / (self.steps - 1) if self.steps > 1 else None

    @property
    def data_stall_fraction(self) -> float:
        """Returns the share of the time that was spent waiting for data."""
        return self.waited_s / self.total_s if self.total_s else 0.0
