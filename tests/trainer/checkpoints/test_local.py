"""Local checkpoints: a restart continues from them, also where a host is replaced."""

import contextlib
import logging
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding

from configs.errors import UserError
from configs.paths import path_of
from tests.trainer.command import Command
from trainer.checkpoints import integrity
from trainer.checkpoints.local import LocalCheckpoints, completed, unchanged_starts
from trainer.metrics.jsonl import METRICS, REPLACED, read_lines
from trainer.resume.history import Start, amend_record, last_saved, record_start, starts

SAVED, EVERY = 20, 5
AXES = ("a", "b", "c")


def make_mesh(*sizes: int) -> Mesh:
    return jax.make_mesh(sizes, AXES[: len(sizes)], (AxisType.Explicit,) * len(sizes))


def state_on(mesh: Mesh, seed: int = 0) -> dict[str, Any]:
    """Arrays of several types, split over some mesh axes, one axis or none."""
    rng, names = np.random.default_rng(seed), mesh.axis_names
    specs = {"whole": (None, None), "rows": (names[0], None), "both": (names[1], names[0]),
             "two": ((names[0], names[1]), None)}  # fmt: skip
    arrays = {name: rng.normal(size=(8, 16)).astype(np.float32) for name in specs}
    arrays["rows"] = arrays["rows"].astype(jax.numpy.bfloat16)
    arrays["both"] = np.float16(-0.0) * arrays["both"].astype(np.float16)  # bits count, not values
    placed = {
        name: jax.device_put(x, NamedSharding(mesh, jax.P(*specs[name])))
        for name, x in arrays.items()
    }
    return {"params": placed, "step": jax.device_put(np.int32(7), NamedSharding(mesh, jax.P()))}


def abstract(state: Any) -> Any:
    return jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), state
    )


def assert_same_bits(restored: Any, expected: Any) -> None:
    """Compares every shard of every device."""
    for a, b in zip(jax.tree.leaves(restored), jax.tree.leaves(expected), strict=True):
        assert a.sharding == b.sharding and a.dtype == b.dtype
        for mine, other in zip(a.addressable_shards, b.addressable_shards, strict=True):
            assert np.asarray(mine.data).tobytes() == np.asarray(other.data).tobytes()


# One process


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    """Of a run that was started once."""
    (tmp_path / "run").mkdir()
    record_start(tmp_path / "run", Start(step=0, time="2026-01-01T00:00:00"))
    return tmp_path / "run"


def opened(model_dir: Path, state: Any) -> LocalCheckpoints:
    mesh = jax.tree.leaves(state)[0].sharding.mesh
    return LocalCheckpoints(model_dir.parent / "local", model_dir, abstract(state), mesh)


class Killed(Exception):
    """Ends a run before its next checkpoint."""


@contextlib.contextmanager
def killed(model_dir: Path, state: Any) -> Iterator[LocalCheckpoints]:
    """Those of a run that is killed at the end of the block."""
    with pytest.raises(Killed), opened(model_dir, state) as kept:
        yield kept
        raise Killed


def restart(model_dir: Path, step: int = 0, **fields: Any) -> None:
    """Records a start as `meshloom train` does."""
    saved = max(step, last_saved(model_dir)) or None
    time = f"2026-01-02T00:00:{len(starts(model_dir)):02}"
    record_start(model_dir, Start(step=step, time=time, saved=saved, **fields))


def test_the_newest_state_comes_back_and_older_ones_go(model_dir: Path) -> None:
    mesh = make_mesh(2, 4)
    states = [state_on(mesh, seed) for seed in range(3)]
    with killed(model_dir, states[0]) as kept:
        for step, state in zip((3, 6, 9), states, strict=True):
            kept.save(step, state)
        assert len(kept._listed()) <= 2
    amend_record(model_dir, saved=5)
    restart(model_dir, step=5)
    with jax.set_mesh(mesh), killed(model_dir, states[0]) as kept:
        restored = kept.restore(newer_than=5)
        assert restored is not None and restored[1] == 9
        assert_same_bits(restored[0], states[2])
        assert kept._listed() == [9]
    with opened(model_dir, states[0]) as kept:
        assert kept._listed() == [9]
        (kept.folder / "12.orbax-checkpoint-tmp").mkdir()
        other = kept.folder.parent / "process_1"
        other.mkdir()
    assert not kept.folder.exists() and other.exists()  # the run is over, for this process


@pytest.mark.parametrize(
    "why", ["another run", "a changed setting", "went back", "a checkpoint is newer",
            "no checkpoint", "another layout", "a damaged file", "a damaged array"],
)  # fmt: skip
def test_what_does_not_belong_to_the_run_is_removed(
    why: str, model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mesh = make_mesh(2, 4)
    state = state_on(mesh)
    with killed(model_dir, state) as kept:
        kept.save(9, state)
    newer_than: int | None = 5
    amend_record(model_dir, saved=5)
    if why == "another run":
        (model_dir / "history.jsonl").unlink()
    restart(model_dir, step=5)
    if why == "a changed setting":
        restart(model_dir, step=5, changes=[{"name": "Run.seed", "old": "0", "new": "1"}])
    elif why == "went back":
        restart(model_dir, step=4)
    elif why == "a checkpoint is newer":
        newer_than = 9
    elif why == "no checkpoint":
        newer_than = None
    elif why == "another layout":
        mesh = make_mesh(4, 2)
        state = state_on(mesh)
    elif why == "a damaged file":
        next(kept.folder.glob("9/state/_METADATA")).write_text("{}")
    elif why == "a damaged array":
        for file in kept.folder.glob("9/state/ocdbt.process_0/d/*"):
            file.write_bytes(file.read_bytes()[:-20] + bytes(20))
    with jax.set_mesh(mesh), killed(model_dir, state) as kept:
        assert kept.restore(newer_than) is None
        assert not kept._listed()
        kept.save(12, state)
    restart(model_dir, step=5)
    with jax.set_mesh(mesh), killed(model_dir, state) as kept:
        restored = kept.restore(newer_than=5)
        assert restored is not None and restored[1] == 12


def test_a_start_that_fails_early_loses_nothing(model_dir: Path) -> None:
    mesh = make_mesh(2, 4)
    state = state_on(mesh)
    with killed(model_dir, state) as kept:
        kept.save(9, state)
    amend_record(model_dir, saved=5)
    for _ in range(3):
        restart(model_dir, step=5)
        with jax.set_mesh(mesh), killed(model_dir, state) as kept:
            restored = kept.restore(newer_than=5)
            assert restored is not None and restored[1] == 9


def test_starts_continue_each_other_up_to_a_change_or_a_way_back() -> None:
    history = [
        Start(step=0, time="a", saved=10),
        Start(step=10, time="b", saved=20, changes=[{"name": "Run.seed"}]),
        Start(step=20, time="c", saved=20),
        Start(step=25, time="d", saved=20),
        Start(step=20, time="e", saved=40),
        Start(step=40, time="f", saved=60),
        Start(step=50, time="g", saved=70),
    ]
    continued = [unchanged_starts(history[:count]) for count in range(1, 8)]
    assert continued == [["a"], ["b"], ["c", "b"], ["d", "c", "b"], ["e", "d", "c", "b"],
                         ["f", "e", "d", "c", "b"], ["g"]]  # fmt: skip
    first, again = (Start(step=0, time=time, began=time) for time in "ab")  # before a checkpoint
    resumed = Start(step=2, time="c", began="b")
    assert unchanged_starts([first, again, resumed]) == ["c", "b"]


def test_a_save_that_fails_is_a_warning(
    model_dir: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh = make_mesh(2, 4)
    state = state_on(mesh)

    def is_full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with killed(model_dir, state) as kept:
        kept.save(3, state)
        kept._wait()
        with monkeypatch.context() as patched, caplog.at_level(logging.WARNING):
            patched.setattr(integrity.ListingHandler, "finalize", is_full)
            kept.save(6, state)
            kept._wait()
        assert 3 in kept._listed()
        assert "the disk is full" in caplog.text
        assert "The run continues without them." in caplog.text
        kept.save(9, state)
        assert 9 not in kept._listed()
    amend_record(model_dir, saved=2)
    restart(model_dir, step=2)
    with jax.set_mesh(mesh), killed(model_dir, state) as kept:
        restored = kept.restore(newer_than=2)
        assert restored is not None and restored[1] == 3


def test_a_folder_that_is_removed_ends_no_run(model_dir: Path) -> None:
    mesh = make_mesh(2, 4)
    state = state_on(mesh)
    with opened(model_dir, state) as kept:
        for step in (3, 6, 9):
            kept.save(step, state)
            kept._wait()
            shutil.rmtree(model_dir.parent / "local")
        kept.save(12, state)
        kept._wait()
        assert kept._listed() == [12]
        shutil.rmtree(model_dir.parent / "local")


@pytest.mark.parametrize("folder", ["a file/below", "gs://bucket/folder"])
def test_a_folder_that_cannot_be_used_is_an_error(folder: str, model_dir: Path) -> None:
    (model_dir.parent / "a file").write_text("")
    state = state_on(make_mesh(2, 4))
    name = path_of(folder) if "://" in folder else model_dir.parent / folder
    with pytest.raises(UserError, match=r"--local_checkpoint_dir ?= ?.*Give a (folder|path) "):
        LocalCheckpoints(name, model_dir, abstract(state), make_mesh(2, 4))


# Lost shards


@pytest.mark.parametrize("sizes", [(2, 4), (4, 2), (2, 2, 2), (8, 1)])
def test_replicas_replace_lost_shards_wherever_there_are_any(sizes: tuple[int, ...]) -> None:
    mesh, rng = make_mesh(*sizes), np.random.default_rng(sum(sizes))
    outcomes = set()
    for share in (0.5, 0.75, 0.9) * 3:
        leaves = jax.tree.leaves(state_on(mesh))
        chosen = [leaves[i] for i in rng.choice(len(leaves), rng.integers(1, 4), replace=False)]
        is_saved = rng.random(mesh.devices.shape) < share
        of_device = dict(zip(mesh.devices.flat, is_saved.flat, strict=True))
        damaged = [
            jax.make_array_from_single_device_arrays(
                x.shape, x.sharding,
                [s.data.copy() if of_device[s.device] else jax.device_put(s.data * 0, s.device)
                 for s in x.addressable_shards],
            )
            for x in chosen
        ]  # fmt: skip
        shards = [[(s.index, of_device[s.device]) for s in x.addressable_shards] for x in chosen]
        expected = all(
            any(saved for other, saved in of_array if other == index)
            for of_array in shards
            for index, _ in of_array
        )
        with jax.set_mesh(mesh):
            whole = completed(abstract(chosen), damaged, is_saved, mesh)
        assert (whole is not None) == expected
        if whole is not None:
            assert_same_bits(whole, chosen)
        outcomes.add(expected)
    assert len(outcomes) == 2 or sizes == (8, 1)


# Two processes


def kept_steps(folder: Path, index: int) -> set[int]:
    """The steps that a process has kept, complete ones alone."""
    manifests = folder.glob(f"local/*/process_{index}/*/state/manifest.json")
    names = (manifest.parent.parent.name for manifest in manifests)
    return {int(name) for name in names if name.isdecimal()}


def test_a_killed_run_continues_from_what_one_host_has_kept(tmp_path: Path) -> None:
    """The other host was replaced: what it had comes over, bit for bit."""
    command = Command.on_new_text(tmp_path)
    flag = f"--local_checkpoint_dir={tmp_path / 'local'}"
    params = [f"Run.checkpoint_every = {SAVED}", f"Run.local_checkpoint_every = {EVERY}"]
    processes = command.train_on(2, flag, params=params)

    metrics = command.model_dir / METRICS

    def newest() -> int:
        return max(kept_steps(tmp_path, 0) & kept_steps(tmp_path, 1), default=0)

    def last_step() -> int:
        return max((line["step"] for line in read_lines(metrics)), default=0)

    def send(number: signal.Signals) -> None:
        for process in processes:
            process.send(number)

    until = time.monotonic() + 300
    while True:
        assert time.monotonic() < until and all(p.popen.poll() is None for p in processes)
        time.sleep(0.002)
        if max(command.steps(), default=10**6) < newest() < last_step() - 1:
            send(signal.SIGSTOP)  # both may have gone on meanwhile
            if max(command.steps()) < (step := newest()) < (last := last_step()):
                break
            send(signal.SIGCONT)
    send(signal.SIGKILL)
    for process in processes:
        process.finish(-signal.SIGKILL)
    shutil.rmtree(next(tmp_path.glob("local/*/process_1")))

    said, _ = [process.finish() for process in command.train_on(2, flag, params=params)]
    assert f"Resuming from step {step}, a local checkpoint" in said
    again = command.losses()
    replaced = {
        x["step"]: x["loss"] for x in read_lines(command.model_dir / f"metrics.jsonl{REPLACED}")
    }
    assert set(replaced) == set(range(step + 1, last + 1))
    assert all(again[number] == loss for number, loss in replaced.items())
    assert starts(command.model_dir)[-1].step == step
    assert not kept_steps(tmp_path, 0) | kept_steps(tmp_path, 1)  # the run is over
