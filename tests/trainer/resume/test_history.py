"""The record of a run, in the history of its starts and in its checkpoints."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest

from configs.errors import UserError
from trainer.resume.history import (
    FILE,
    Start,
    amend_record,
    last_saved,
    record_of,
    record_start,
    starts,
    unknown_starts,
    values_by_step,
)

THEN, NOW = "2026-01-01T00:00:00", "2026-01-02T00:00:00"


def test_each_start_is_a_line(tmp_path: Path) -> None:
    assert starts(tmp_path / "run") == []
    changes = [{"name": "Run.steps", "old": "5", "new": "None"}]
    first = Start(0, THEN, "data", "abc", settings="first")
    second = Start(7, NOW, "other", changes=changes, settings="second", vocab={"vocab_hash": "x"})
    for start in (first, second):
        record_start(tmp_path / "run", start)
    before, last = starts(tmp_path / "run")
    assert (before.step, before.content_hash, before.settings) == (0, "abc", None)
    assert last == second == record_of(tmp_path / "run")


def test_lines_of_other_versions_are_read(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(
        '{"step": 1, "time": "2026-01-01T00:00:00", "unknown": 3}\n{"step": 2}\n'
    )
    (start,) = starts(tmp_path)
    assert (start.step, start.time, start.data_dir, start.order) == (1, THEN, None, 1)


@pytest.mark.parametrize(
    "line",
    [
        '"time": 3',
        '"time": "never"',
        '"time": "2026-01-01", "changes": 5',
        '"time": "2026-01-01", "changes": [{}]',
        '"time": "2026-01-01", "changes": [{"name": "Run.seed", "old": "1"}]',
        '"time": "2026-01-01", "data_dir": []',
    ],
)
def test_a_line_of_wrong_types_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, line: str
) -> None:
    (tmp_path / FILE).write_text(f'{{"step": 1, {line}}}\n')
    assert starts(tmp_path) == [] and "history.jsonl: damaged records: 1." in caplog.text


def test_a_changed_bit_of_a_record_is_noticed(tmp_path: Path) -> None:
    record_start(tmp_path, Start(3, THEN, "data", "abc", settings="x", saved=4))
    whole = (tmp_path / FILE).read_bytes()
    for place in range(len(whole)):
        changed = bytearray(whole)
        changed[place] ^= 1 << place % 8
        (tmp_path / FILE).write_bytes(changed)
        assert starts(tmp_path) == [], changed


def test_a_checkpoint_keeps_the_record_as_well(tmp_path: Path) -> None:
    start = Start(3, THEN, changes=[], settings="x")
    for step, run in ((4, start.dump()), (8, None)):
        folder = tmp_path / "checkpoints" / str(step) / "state"
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text(json.dumps({"run": run}))
    assert record_of(tmp_path) == start
    record_start(tmp_path, Start(3, THEN, content_hash="damaged"))
    assert record_of(tmp_path) == start
    later = Start(8, NOW, changes=[], settings="y")
    record_start(tmp_path, later)
    assert record_of(tmp_path) == later


def save(model_dir: Path, step: int, start: Start) -> None:
    """Writes what a checkpoint has of the start that saved it."""
    folder = model_dir / "checkpoints" / str(step) / "state"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "manifest.json").write_text(json.dumps({"run": start.dump()}))


@pytest.mark.parametrize("field", ["content_hash", "vocab"])
def test_checkpoints_of_another_run_are_refused(tmp_path: Path, field: str) -> None:
    mine = {"content_hash": "abc", "vocab": {"vocab_hash": "x"}}
    other = {"vocab_hash": "y"} if field == "vocab" else "abd"
    save(tmp_path, 4, Start(0, THEN, **mine))
    assert not [*unknown_starts(tmp_path)]  # the history is lost
    record_start(tmp_path, Start(0, THEN, **mine, settings="x"))
    record_start(tmp_path, Start(4, NOW, **{**mine, "content_hash": "more"}, settings="x"))
    # The first start saved it: then the mixture had fewer parts.
    assert not [*unknown_starts(tmp_path)]
    save(tmp_path, 4, Start(0, THEN, **{**mine, field: other}))
    with pytest.raises(UserError, match=r"checkpoint 4 and history.jsonl are of different runs"):
        next(unknown_starts(tmp_path))
    text = (tmp_path / FILE).read_text()
    (tmp_path / FILE).write_text(text.replace('"step": 0', '"step": 1'))
    assert not [*unknown_starts(tmp_path)]  # a damaged line may have named what the checkpoint does


@pytest.mark.parametrize("lines", [0, 1])
def test_a_checkpoint_knows_what_its_start_has_changed(tmp_path: Path, lines: int) -> None:
    first, changes = Start(0, THEN, settings="x"), [{"name": "batch", "old": "4", "new": "8"}]
    second = Start(6, NOW, changes=changes, settings="y")
    for start in (first, second):
        record_start(tmp_path, start)
    save(tmp_path, 10, second)
    whole = (tmp_path / FILE).read_text().splitlines(keepends=True)
    (tmp_path / FILE).write_text("".join(whole[:lines]))
    expected = [(0, {"batch": 4}), (6, {"batch": 8})]
    assert values_by_step(tmp_path, {"batch": 8}) == expected
    record_start(tmp_path, Start(10, f"{NOW}.5", settings="z"))
    assert values_by_step(tmp_path, {"batch": 8}) == [*expected, (10, {"batch": 8})]


@pytest.mark.parametrize("old", ["__import__('os')", "(" * 999])
def test_a_change_that_holds_no_value_is_an_error(tmp_path: Path, old: str) -> None:
    changes = [{"name": "batch", "old": old, "new": "4"}]
    record_start(tmp_path, Start(3, THEN, changes=changes, settings="x"))
    with pytest.raises(UserError, match=r"^history.jsonl: a setting was .*, which is no value\.$"):
        values_by_step(tmp_path, {"batch": 4})


@pytest.mark.parametrize("is_old", [False, True])
def test_checkpoints_that_come_back_after_a_restart_have_the_record(
    tmp_path: Path, is_old: bool
) -> None:
    """An older version does not record when a run began."""
    killed, first = (
        Start(0, t, changes=[], settings=t, began=None if is_old else t)
        for t in (THEN, f"{THEN}.5")
    )
    restart, later = (
        Start(n, f"{NOW}.{n}", changes=[], settings="x", began=f"{NOW}.0") for n in (0, 4)
    )
    for record in (killed, first):
        record_start(tmp_path, record)
        assert record_of(tmp_path) == record
    save(tmp_path, 4, first)
    for record in (restart, later):
        record_start(tmp_path, record)
        assert record_of(tmp_path) == first and not [*unknown_starts(tmp_path)]
    save(tmp_path, 2, restart)
    with pytest.raises(
        UserError, match=rf"checkpoint 2 .*: began {NOW}.0 there, {first.began} here\."
    ):
        next(unknown_starts(tmp_path))
    save(tmp_path, 4, later)
    assert record_of(tmp_path) == later and not [*unknown_starts(tmp_path)]
    shutil.rmtree(tmp_path / "checkpoints/2")
    save(tmp_path, 4, first)
    resumed = Start(4, f"{NOW}.7", changes=[], settings="w", began=first.began)
    record_start(tmp_path, resumed)  # from the checkpoints that came back
    assert record_of(tmp_path) == resumed and not [*unknown_starts(tmp_path)]
    assert values_by_step(tmp_path, {"batch": 8}) == [(0, {"batch": 8}), (4, {"batch": 8})]


def test_a_copy_of_the_run_that_trained_on_has_the_record(tmp_path: Path) -> None:
    """Its checkpoint in the folder of the run means the same as a lost line of the history."""
    first, *others = (
        Start(n, f"{NOW}.{n}", content_hash=str(n), changes=[], settings=str(n), began=THEN)
        for n in (0, 4, 5)  # a mixture, with one more part each time
    )
    record_start(tmp_path, first)
    save(tmp_path, 6, others[0])
    assert record_of(tmp_path) == others[0] and [*unknown_starts(tmp_path)] == [(6, others[0])]
    record_start(tmp_path, later := dataclasses.replace(others[1], step=6))
    assert record_of(tmp_path) == later  # it resumed from that checkpoint
    whole = (tmp_path / FILE).read_text().splitlines(keepends=True)
    (tmp_path / FILE).write_text(whole[0] + whole[2])
    assert record_of(tmp_path) == later


def test_starts_have_an_order_in_any_time_zone(tmp_path: Path) -> None:
    zones = ("2026-01-01T10:00:00+00:00", "2026-01-01T04:00:00-08:00", "2026-01-01T22:00:00+09:00")
    first, lost, last = (Start(n, time) for n, time in enumerate(zones))
    record_start(tmp_path, first)
    save(tmp_path, 1, lost)
    record_start(tmp_path, last)
    assert [start.step for start in starts(tmp_path)] == [0, 1, 2]


def test_the_record_of_a_run_that_went_back_is_the_last_one(tmp_path: Path) -> None:
    record_start(tmp_path, Start(8, THEN, changes=[], settings="x", saved=12))
    record_start(tmp_path, last := Start(4, NOW, changes=[], settings="y"))
    assert record_of(tmp_path) == last and last_saved(tmp_path) == 12


@pytest.mark.parametrize("damage", [b"", b"{}\n", None])
def test_without_a_whole_record_the_metrics_say_how_far_a_run_came(
    tmp_path: Path, damage: bytes | None
) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 7, "loss": 1.0}\n{"step": 9, "loss": 1.0}\n')
    record_start(tmp_path, Start(0, THEN, settings="x"))
    assert last_saved(tmp_path) == 0
    record_start(tmp_path, Start(0, NOW, settings="y", saved=8))
    assert last_saved(tmp_path) == 8
    first, _ = (tmp_path / FILE).read_bytes().splitlines(keepends=True)
    if damage is None:
        (tmp_path / FILE).unlink()
    else:
        (tmp_path / FILE).write_bytes(first + damage)
    assert last_saved(tmp_path) == 9


def test_the_largest_step_that_was_saved_is_known(tmp_path: Path) -> None:
    amend_record(tmp_path, saved=2)
    assert last_saved(tmp_path) == 0 and not (tmp_path / FILE).exists()
    record_start(tmp_path, Start(0, THEN, settings="x"))
    assert last_saved(tmp_path) == 0
    amend_record(tmp_path, saved=2)
    amend_record(tmp_path, saved=4)
    record_start(tmp_path, Start(0, NOW))
    assert last_saved(tmp_path) == 4 and [start.saved for start in starts(tmp_path)] == [4, None]


def test_a_damaged_record_stays_in_the_history(tmp_path: Path) -> None:
    """So what a run did before it stays unknown, not wrong."""
    for step, time in ((0, THEN), (4, NOW)):
        record_start(tmp_path, Start(step, time, settings="x"))
    first, last = (tmp_path / FILE).read_text().splitlines()
    for damaged in (first.replace("step", "stop"), first.replace('"step": 0', '"step": 1'), "{"):
        (tmp_path / FILE).write_text(f"{damaged}\n{last}\n")
        record_start(tmp_path, Start(8, "2026-11-30T09:00:00+00:00", settings="x"))
        lines = (tmp_path / FILE).read_text().splitlines()
        assert lines[0] == damaged and [start.step for start in starts(tmp_path)] == [4, 8]
