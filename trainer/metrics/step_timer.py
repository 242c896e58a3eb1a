"""Times training steps, and what the loop spends its time on."""

import contextlib
import time
from collections.abc import Iterator
from typing import Literal, get_args

import jax

Activity = Literal["restore", "compile", "data", "device", "replay", "checkpoints", "evaluation"]
ACTIVITIES: tuple[Activity, ...] = get_args(Activity)


class StepTimer:
    """Measures the seconds between steps, and by activity.

    The means exclude the first step; the totals by activity include everything.
    """

    def __init__(self) -> None:
        self.steps, self.total_s, self.first_wait_s = 0, 0.0, 0.0
        self.began = self.last = time.perf_counter()
        self.spent_s = dict.fromkeys(ACTIVITIES, 0.0)

    @contextlib.contextmanager
    def spending(self, activity: Activity) -> Iterator[None]:
        """Adds the time within to an activity; a profile shows it under the activity's name."""
        before = time.perf_counter()
        with jax.profiler.TraceAnnotation(activity):
            yield
        self.spent_s[activity] += time.perf_counter() - before

    def restart(self) -> None:
        """Excludes the time since the last step."""
        self.last = time.perf_counter()

    def rates(self, tokens: float) -> dict[str, float | None]:
        """Returns the rates of the step that ends now, and the totals up to now."""
        now = time.perf_counter()
        step_s, self.last = now - self.last, now
        if self.steps:
            self.total_s += step_s
        else:
            self.first_wait_s = self.spent_s["data"]
        self.steps += 1
        totals = {f"{activity}_total_s": seconds for activity, seconds in self.spent_s.items()}
        return {
            "tokens_per_s": tokens / step_s,
            "step_s": step_s,
            "data_stall_fraction": self.data_stall_fraction,
            "host_total_s": now - self.began - sum(self.spent_s.values()),
            **totals,
        }

    @property
    def step_s(self) -> float | None:
        """Returns the mean seconds of a step."""
        return self.total_s / (self.steps - 1) if self.steps > 1 else None

    @property
    def data_stall_fraction(self) -> float:
        """Returns the share of the time that was spent waiting for data."""
        waited_s = self.spent_s["data"] - self.first_wait_s
        return waited_s / self.total_s if self.total_s else 0.0
