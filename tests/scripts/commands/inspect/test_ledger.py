"""The ledger: which steps read which rows, as a reader that counts them one by one finds."""

import dataclasses
import itertools
import random
from collections import Counter, defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from data import mixture, order
from data.batch_sizes import BatchSizes
from data.documents import Documents
from data.mixture import MixtureOrder
from data.packing.rows import Counts, Rows, RowsOfPart
from scripts.commands.inspect.data import Ledger
from trainer.resume.history import Start, record_start

STEPS = 60


def random_rows(draw: random.Random) -> Rows:
    """Rows of one text or of a mixture, with stages or without; each row holds two documents."""
    sizes = [draw.randint(1, 40) for _ in range(draw.randint(1, 4))]
    total = sum(sizes)
    arrays = {
        "targets": np.arange(1, 3 * total + 1, dtype=np.uint16).reshape(total, 3),
        "segments": np.tile(np.array([1, 2, 2], np.uint16), (total, 1)),
    }
    of_rows: Any = {
        "numbers": np.arange(1, 2 * total + 1)[:, None],
        "pieces": np.stack([np.arange(2 * total), np.arange(2 * total) // 2], axis=1),
    }
    starts = np.array([(0, 0, 0), (2 * total, 2 * total, total)])
    rows = Rows(
        arrays, Counts(rows=total), documents=Documents([("a", 2 * total)], starts, of_rows)
    )
    if len(sizes) == 1:
        return rows

    def rates() -> list[float]:
        return [draw.choice((0, 1, 3.5, 0.2)) for _ in sizes[1:]] + [1]

    stages = [(step, rates()) for step in sorted(draw.sample(range(1, STEPS), draw.randint(0, 3)))]
    ends = np.cumsum(sizes).tolist()
    parts = [
        RowsOfPart(f"part{i}", range(end - size, end), Counts(rows=size), {})
        for i, (size, end) in enumerate(zip(sizes, ends, strict=True))
    ]
    begun = draw.randint(1, len(sizes))  # parts that are there from the start
    first = [*rates()[-begun:-1], 1]
    mix = MixtureOrder.of(sizes, first, stages)
    return dataclasses.replace(rows, mix=mix, parts=parts)


def settings_of(
    batch: int, seed: int, exclude: tuple[str, ...] = (), stages: tuple[tuple[int, int], ...] = ()
) -> Any:
    return SimpleNamespace(
        batch_sequences=batch, seed=seed, exclude=exclude, batch_stages=stages, length_stages=()
    )


def check(ledger: Ledger, batches: list[BatchSizes], seed: int, excluded: list[set[int]]) -> None:
    """Compares a ledger with steps of these batches, without these documents, read by two hosts."""
    rows, steps, read = ledger.rows, defaultdict(list), Counter[str]()
    ends = [part.rows.stop for part in rows.parts] or [len(rows)]
    names = [part.name for part in rows.parts] or ["all"]
    sizes = [len(part.rows) for part in rows.parts] or [len(rows)]
    middle = len(batches) // 2
    for step, (sizes_now, left_out) in enumerate(zip(batches, excluded, strict=True), 1):
        ids, of_step = ledger.rows_of_step(step)
        batch = sizes_now.at(step - 1)
        spans = (0, batch // 2), (batch // 2, batch)
        hosts = [next(order.batches(of_step, seed, sizes_now, step - 1, span)) for span in spans]
        assert all(host_ids.tolist() == ids.tolist() for host_ids, _ in hosts)
        targets = np.concatenate([arrays["targets_BL"] for _, arrays in hosts])
        for row, target in zip(ids.tolist(), targets.tolist(), strict=True):
            kept = [2 * row + segment not in left_out for segment in (0, 1, 1)]
            assert target == [(3 * row + i + 1) * kept[i] for i in range(3)]
            read[names[int(np.searchsorted(ends, row, side="right"))]] += 1
            for segment in (1, 2):
                steps[row, segment] += [step] * kept[segment - 1]
        if step in (middle, len(batches)):
            assert [tuple(count.values()) for count in ledger.counts(step)] == [
                (name, size, read[name], read[name] / size)
                for name, size in zip(names, sizes, strict=True)
            ]
    for row, segment in itertools.product(range(len(rows)), (1, 2)):
        read_by = steps[row, segment]
        assert list(ledger.steps_of_segment(row, segment, len(batches))) == read_by
        assert list(ledger.steps_of_segment(row, segment, middle)) == [
            s for s in read_by if s <= middle
        ]


@pytest.mark.few(4)
@pytest.mark.parametrize("table_rows", [mixture.TABLE_ROWS, 1])
@pytest.mark.parametrize("seed", range(6))
def test_a_row_is_read_at_the_steps_of_the_ledger(
    monkeypatch: pytest.MonkeyPatch, seed: int, table_rows: int
) -> None:
    """Also without a table of the order, as of more rows than it may have."""
    monkeypatch.setattr(mixture, "TABLE_ROWS", table_rows)
    draw = random.Random(seed)
    batch, rows = draw.choice((1, 2, 7, 50)), random_rows(draw)
    last = draw.randint(1, 2 * len(rows))
    stages = ((5, batch + 3), (40, 2 * batch)) if seed % 3 else ()
    run = settings_of(batch, seed, (f"a:1-{last}",) * (seed % 2), stages)
    excluded = set(range(last)) if seed % 2 else set()
    check(Ledger.of(run, rows), [BatchSizes(batch, stages)] * STEPS, seed, [excluded] * STEPS)


@pytest.mark.parametrize("seed", range(4))
def test_earlier_steps_have_the_settings_of_their_time(tmp_path: Path, seed: int) -> None:
    """Of a run that changed its batch and its documents, and went back to an older checkpoint."""
    rows = random_rows(random.Random(seed))
    lists: list[tuple[str, ...]] = [(), ("a:1",), ("a:1", "a:2"), (), ()]
    stages: Any = [(), (), (), (), ((45, 7),)]
    sizes, old = (4, 6, 9, 9, 5), (4, (), ())
    news = zip(sizes, lists, stages, strict=True)
    for step, new in zip((0, 10, 30, 20, 40), news, strict=True):
        changes = [
            {"name": name, "old": repr(before), "new": repr(now)}
            for name, before, now in zip(
                ("Run.batch_sequences", "Run.exclude", "Run.batch_stages"), old, new, strict=True
            )
            if before != now
        ]
        record_start(tmp_path, Start(step, "2026-01-01", changes=changes, settings=""))
        old = new
    ledger = Ledger.of(settings_of(5, seed, stages=stages[-1]), rows, tmp_path)
    excluded: list[set[int]] = [set()] * 10 + [{0}] * 10 + [set()] * 30
    batches = [4] * 10 + [6] * 10 + [9] * 20
    last = BatchSizes(5, stages[-1])
    check(ledger, [*map(BatchSizes, batches), *[last] * 10], seed, excluded)


def test_a_billion_rows_take_no_time_and_no_memory() -> None:
    rows = (10**9, 10**8)
    arrays = dict.fromkeys(("targets", "segments"), np.broadcast_to(np.uint16(1), (sum(rows), 3)))
    mix = MixtureOrder.of(rows, (1, 3), ((10**6, (3, 1)),))
    ledger = Ledger.of(settings_of(1024, 7), Rows(arrays, Counts(), mix=mix))
    for row in (5, 10**9 + 17):
        steps = list(ledger.steps_of_segment(row, 1, 3 * 10**6))
        assert len(steps) >= 1 and all(row in ledger.rows_of_step(step)[0] for step in steps)
