"""Says which rows each step of a run reads: a function of its seed, its data and its settings."""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from data.batch_sizes import BatchSizes, value_at
from data.packing.rows import Rows
from trainer.resume.history import values_by_step
from trainer.run import MAX_STEPS, Run

Stages = tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True)
class Ledger:
    """Knows the rows of each step of a run.  Steps count from 1, as in metrics."""

    rows: Rows
    seed: int
    periods: Sequence[tuple[int, int, BatchSizes, Rows, Stages]]
    """Two numbers of steps; of the steps after the first, to the second, the sizes of batches, all
    rows without the documents that are excluded, and the stages of their lengths."""

    @classmethod
    def of(cls, run: Run, rows: Rows, model_dir: Path | None = None) -> "Ledger":
        """Takes the settings of a run, and from its directory those of its earlier steps."""
        names = ("batch_sequences", "batch_stages", "exclude", "length_stages")
        values = values_by_step(model_dir, {f"Run.{name}": getattr(run, name) for name in names})
        stops = [*(step for step, _ in values[1:]), MAX_STEPS]
        periods = [
            (step, stop, BatchSizes(batch, batch_stages), rows.without(exclude), length_stages)
            for (step, now), stop in zip(values, stops, strict=True)
            for batch, batch_stages, exclude, length_stages in [now.values()]
        ]
        return cls(rows, run.seed, periods)

    def rows_of_step(self, step: int) -> tuple[np.ndarray, Rows]:
        """Returns the numbers of the rows of a step, and the rows as the step reads them."""
        [(_, _, sizes, rows, stages)] = [x for x in self.periods if x[0] < step <= x[1]]
        rows = dataclasses.replace(rows, batch_length=value_at(step - 1, None, stages))
        return rows.order.rows_of_step(self.seed, step - 1, sizes), rows

    def steps_of_segment(self, row: int, segment: int, last_step: int) -> Iterator[int]:
        """Yields the steps up to the last that read a segment; one that reads it twice, twice."""
        for first, stop, sizes, rows, _ in self.periods:
            span = first, min(stop, last_step)
            if segment in rows.segments_BL[np.array([row])]:
                steps = self.rows.order.steps_of_row(self.seed, row, sizes, *span)
                yield from (step + 1 for step in steps)

    def counts(self, last_step: int) -> list[dict[str, Any]]:
        """Counts the rows, and the epochs, that the steps up to the last read of each part."""
        names = [part.name for part in self.rows.parts] if self.rows.mix else ["all"]
        read = np.zeros(len(names), np.int64)
        for first, stop, sizes, *_ in self.periods:
            read += self.rows.order.drawn_before(self.seed, min(stop, last_step), sizes)
            read -= self.rows.order.drawn_before(self.seed, min(first, last_step), sizes)
        return [
            {"part": name, "rows": rows, "rows_read": count, "epochs": count / rows}
            for name, rows, count in zip(names, self.rows.order.rows, read.tolist(), strict=True)
        ]
