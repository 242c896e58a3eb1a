"""The ledger: which steps read which rows, as a reader that counts them one by one finds."""

import random
from collections import Counter, defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from data import mixture, order
from data.mixture import MixtureOrder
from data.packing.rows import Counts, Rows, RowsOfPart
from trainer.ledger import Ledger
from trainer.resume.history import Start, record_start

STEPS = 60


def random_rows(draw: random.Random) -> Rows:
    """Rows of one text or of a mixture, with stages or without."""
    sizes = [draw.randint(1, 40) for _ in range(draw.randint(1, 4))]
    total = sum(sizes)
    arrays = {"targets": np.ones((total, 3), np.uint16), "segments": np.ones((total, 3), np.uint16)}
    if len(sizes) == 1:
        return Rows(arrays, Counts(rows=total))

    def rates() -> list[float]:
        return [draw.choice((0, 1, 3.5, 0.2)) for _ in sizes[1:]] + [1]

    stages = [(step, rates()) for step in sorted(draw.sample(range(1, STEPS), draw.randint(0, 3)))]
    ends = np.cumsum(sizes).tolist()
    parts = [
        RowsOfPart(f"part{i}", range(end - size, end), Counts(rows=size), {})
        for i, (size, end) in enumerate(zip(sizes, ends, strict=True))
    ]
    return Rows(
        arrays, Counts(rows=total), mix=MixtureOrder.of(sizes, rates(), stages), parts=parts
    )


def settings_of(batch: int, seed: int) -> Any:
    return SimpleNamespace(batch_sequences=batch, seed=seed)


def check(ledger: Ledger, batches: list[int], seed: int) -> None:
    """Compares a ledger with the batches of steps of these sizes, read as training reads them."""
    rows, steps, read = ledger.rows, defaultdict(list), Counter[str]()
    ends = [part.rows.stop for part in rows.parts] or [len(rows)]
    names = [part.name for part in rows.parts] or ["all"]
    sizes = [len(part.rows) for part in rows.parts] or [len(rows)]
    middle = len(batches) // 2
    for step, batch in enumerate(batches, 1):
        ids, _ = next(order.batches(rows, seed, batch, step - 1, (0, 1)))
        assert ledger.rows_of_step(step).tolist() == ids.tolist()
        for row in ids.tolist():
            steps[row].append(step)
            read[names[int(np.searchsorted(ends, row, side="right"))]] += 1
        if step in (middle, len(batches)):
            assert [tuple(count.values()) for count in ledger.counts(step)] == [
                (name, size, read[name], read[name] / size)
                for name, size in zip(names, sizes, strict=True)
            ]
    for row in range(len(rows)):
        assert list(ledger.steps_of_row(row, len(batches))) == steps[row]
        assert list(ledger.steps_of_row(row, middle)) == [s for s in steps[row] if s <= middle]


@pytest.mark.parametrize("table_rows", [mixture.TABLE_ROWS, 1])
@pytest.mark.parametrize("seed", range(6))
def test_a_row_is_read_at_the_steps_of_the_ledger(
    monkeypatch: pytest.MonkeyPatch, seed: int, table_rows: int
) -> None:
    """Also without a table of the order, as of more rows than it may have."""
    monkeypatch.setattr(mixture, "TABLE_ROWS", table_rows)
    draw = random.Random(seed)
    batch = draw.choice((1, 2, 7, 50))
    check(Ledger.of(settings_of(batch, seed), random_rows(draw)), [batch] * STEPS, seed)


@pytest.mark.parametrize("seed", range(4))
def test_earlier_steps_have_the_batches_of_their_time(tmp_path: Path, seed: int) -> None:
    """Of a run that changed its batch, and went back to an older checkpoint."""

    def start(step: int, old: int, new: int) -> Start:
        change = {"name": "Run.batch_sequences", "old": str(old), "new": str(new)}
        return Start(step, "", changes=[change] if old != new else [], settings="")

    for step, old, new in ((0, 4, 4), (10, 4, 6), (30, 6, 9), (20, 9, 9), (40, 9, 5)):
        record_start(tmp_path, start(step, old, new))
    rows = random_rows(random.Random(seed))
    ledger = Ledger.of(settings_of(5, seed), rows, tmp_path)
    check(ledger, [4] * 10 + [6] * 10 + [9] * 20 + [5] * 10, seed)


def test_a_billion_rows_take_no_time_and_no_memory() -> None:
    rows = (10**9, 10**8)
    arrays = {"targets": np.broadcast_to(np.uint16(1), (sum(rows), 3))}
    mix = MixtureOrder.of(rows, (1, 3), ((10**6, (3, 1)),))
    ledger = Ledger.of(settings_of(1024, 7), Rows(arrays, Counts(), mix=mix))
    for row in (5, 10**9 + 17):
        steps = list(ledger.steps_of_row(row, 3 * 10**6))
        assert len(steps) >= 1 and all(row in ledger.rows_of_step(step) for step in steps)
