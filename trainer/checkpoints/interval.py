"""Chooses the steps at which a run saves: a given interval, or one from measured times."""

import dataclasses
import math
from typing import Literal

from trainer.processes import peers

HOUR_S = 3600
DAY_S = 24 * HOUR_S
FAILURES_PER_CHIP_DAY = 5e-4
"""Llama 3 (Grattafiori et al. 2024, section 3.3.4) saw 419 interruptions of 16,384 GPUs in 54 days,
4.7e-4; OPT-175B (Zhang et al. 2022, section 2.5) 105 of 992 in 60 days, 1.8e-3."""
MEASURED_STEPS = 10
"""Steps from a start to its first save, which shows the cost of a save."""
LONGEST_S = HOUR_S
"""Longest automatic interval between saves, since runs do not end only by failures."""


def best_interval(save_s: float, step_s: float, failures_per_s: float, write_s: float = 0) -> int:
    """Returns the number of steps between saves that costs the least (Young 1974).

    It balances the time for saves against the steps that are repeated after failures.  An interval
    shorter than `write_s` would make the next save wait.
    """
    interval_s = math.sqrt(2 * save_s / max(failures_per_s, 1e-30))
    return max(1, math.ceil(write_s / step_s), round(interval_s / step_s))


@dataclasses.dataclass
class SaveInterval:
    """Decides at which steps a run saves.  All processes of a run agree on them."""

    every: int | Literal["auto"]
    first_step: int
    devices: int

    def __post_init__(self) -> None:
        self._next = self.first_step + MEASURED_STEPS

    def is_due(self, step: int) -> bool:
        return step >= self._next if self.every == "auto" else step % self.every == 0

    def saved(self, step: int, save_s: float, step_s: float | None) -> None:
        """Chooses the next step after a save; `save_s` is how long training waited for it."""
        if self.every != "auto" or step_s is None:
            return
        failures_per_s = FAILURES_PER_CHIP_DAY * self.devices / DAY_S
        best = min(best_interval(save_s, step_s, failures_per_s), round(LONGEST_S / step_s))
        others, steps = peers.current(), max(1, best)
        self._next = step + (steps if others is None else others.gather(steps)[0])
