"""Steps that are computed again agree, and a device that computes wrong is named."""

import dataclasses
import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from configs.errors import RunError
from layouts.layout import Layout
from layouts.mesh import make_mesh
from tests.trainer.test_loop import RUN, Recorder, job
from trainer import loop, replay
from trainer.checkpoints.manager import Checkpoints
from trainer.loop import TrainJob, train
from trainer.replay import describe, rotated
from trainer.run import Run

REPLAYED = dataclasses.replace(RUN, replay_every=2)
LAYOUTS = [
    Layout(mesh="data:4", rules="batch:data"),
    Layout(mesh="data:2,model:2", rules="batch:data;d_ff:model", param_rules="d_model:data"),
]
Corrupt = Callable[[Any, Mesh], Any]


def job_under(layout: Layout, folder: Path, run: Run = REPLAYED) -> TrainJob:
    return dataclasses.replace(job(folder, run), layout=layout, mesh=make_mesh(layout))


def corrupted(
    monkeypatch: pytest.MonkeyPatch,
    corrupt: Corrupt,
    *,
    before: bool = False,
    step: int = 2,
    part: str = "params",
) -> None:
    """Changes what the second step, or another, reads or makes, on whichever mesh it runs."""
    number = step
    compile_right = loop.compile_train_step

    def compile_wrong(job: TrainJob, state: Any) -> Any:
        compiled = compile_right(job, state)

        def step(state: Any, batch: Any) -> Any:
            is_chosen = int(state["step"]) == number - 1
            if before and is_chosen:
                state = state | {part: corrupt(state[part], job.mesh)}
            state, metrics = compiled.executable(state, batch)
            if is_chosen and not before:
                state = state | {part: corrupt(state[part], job.mesh)}
            return state, metrics

        return dataclasses.replace(compiled, executable=step)

    monkeypatch.setattr(loop, "compile_train_step", compile_wrong)


def doubled(number: int, array: jax.Array) -> jax.Array:
    """Doubles the shards that are on one device."""
    shards = [
        jax.device_put(np.asarray(s.data) * (1 + (s.device.id == number)), s.device)
        for s in array.addressable_shards
    ]
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, shards)


def on_device(number: int, params: Any, mesh: Mesh) -> Any:
    """Doubles the shards of the first weights that are on one device."""
    return params | {"embed_VD": doubled(number, params["embed_VD"])}


def moments_on_device(number: int, opt_state: Any, mesh: Mesh) -> Any:
    """Doubles the optimizer's arrays on one device."""
    return jax.tree.map(lambda x: doubled(number, x) if x.ndim else x, opt_state)


@pytest.mark.few(1)
@pytest.mark.parametrize("layout", LAYOUTS, ids=["data", "fsdp"])
def test_replays_agree_and_change_nothing(layout: Layout, tmp_path: Path) -> None:
    plain, replayed = Recorder(), Recorder()
    train(job_under(layout, tmp_path / "plain", RUN), [plain])
    train(job_under(layout, tmp_path / "replayed"), [replayed])
    assert replayed.losses == plain.losses and replayed.calls == plain.calls


@pytest.mark.parametrize("layout", LAYOUTS, ids=["data", "fsdp"])
@pytest.mark.parametrize("device", [0, 2])
def test_the_device_that_updates_wrong_is_named(
    layout: Layout, device: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corrupted(monkeypatch, functools.partial(on_device, device))
    with pytest.raises(RunError) as failure:
        train(job_under(layout, tmp_path))
    message = str(failure.value)
    assert message.startswith("Step 2 gives a different state")
    assert message.count("\n  shard") == 2
    name = jax.devices()[device]
    assert f"\n  {name} computes wrong results" in message
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.latest is None  # the wrong weights are not saved


def test_an_error_that_sums_spread_is_named_by_what_each_device_computes_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corrupted(monkeypatch, functools.partial(on_device, 1), before=True)
    with pytest.raises(RunError, match=r"(?s)shard 0.*shard 3.*Sums over devices spread") as first:
        train(job_under(LAYOUTS[0], tmp_path))
    assert "computes wrong" not in str(first.value)
    right = replay.probes
    monkeypatch.setattr(replay, "probes", lambda mesh: right(mesh) | {3: 0.5})
    with pytest.raises(RunError, match=rf"{jax.devices()[3]} computes wrong"):
        train(job_under(LAYOUTS[0], tmp_path))


def test_an_error_that_does_not_repeat_leaves_two_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def once(params: Any, mesh: Mesh) -> Any:
        is_replay = mesh.devices.flat[0] != jax.devices()[0]
        return params if is_replay else on_device(2, params, mesh)

    corrupted(monkeypatch, once)
    with pytest.raises(RunError) as failure:
        train(job_under(LAYOUTS[0], tmp_path))
    devices = jax.devices()
    assert f"shard 2: on {devices[2]}, then on {devices[1]}: " in str(failure.value)
    assert f"{devices[1]} or {devices[2]} computes wrong" in str(failure.value)


@pytest.mark.parametrize("part", ["params", "opt_state"])
def test_a_replica_that_an_earlier_step_made_differ_is_named(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replay copies each replica to another device, and computes with it what was computed."""
    corrupt = on_device if part == "params" else moments_on_device

    def here(tree: Any, mesh: Mesh) -> Any:
        return corrupt(2, tree, mesh)

    corrupted(monkeypatch, here, step=1, part=part)
    with pytest.raises(
        RunError, match=rf"After step 2, devices .*: {jax.devices()[2]} has computed wrong"
    ):
        train(job_under(LAYOUTS[0], tmp_path))


@pytest.mark.parametrize("layout", LAYOUTS, ids=["data", "fsdp"])
def test_a_device_whose_optimizer_state_is_wrong_is_named(
    layout: Layout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corrupted(monkeypatch, functools.partial(moments_on_device, 1), part="opt_state")
    name = jax.devices()[1]
    with pytest.raises(RunError, match=rf"(?s)Step 2 gives a different.*\n  {name} computes"):
        train(job_under(layout, tmp_path))


@pytest.mark.long
def test_a_neighbour_whose_error_sums_have_spread_is_not_cleared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Device 1 errs once, and a sum gives the error to device 0 as well."""

    def once(params: Any, mesh: Mesh) -> Any:
        is_replay = mesh.devices.flat[0] != jax.devices()[0]
        return params if is_replay else on_device(1, params, mesh)

    layout = Layout(mesh="copy:2,data:2", rules="batch:data")
    corrupted(monkeypatch, once, before=True)
    with pytest.raises(
        RunError, match=r"computes wrong results, unless sums spread an error"
    ) as failure:
        train(job_under(layout, tmp_path))
    assert str(failure.value).count("\n  shard") == 2


def test_a_moment_that_hardly_changes_may_differ_by_round_off() -> None:
    """Its change is smaller than the round-off of gradients that stay as they are."""
    moment, noise = np.ones(8, np.float32), np.float32(1e-3)
    kinds = {name: [jax.numpy.asarray(moment)] for name in (".mu", replay.WEIGHTS)}
    others = {name: [jax.numpy.asarray(moment + noise)] for name in kinds}
    [mu, weights] = np.asarray(replay.change(kinds, others))[0]
    [apart, _] = np.asarray(replay.distance(kinds, others))[0]
    assert replay.share(float(apart), float(mu)) < replay.TOLERANCE
    assert weights == pytest.approx(float(apart))


def test_healthy_devices_compute_the_same_alone() -> None:
    results = replay.probes(make_mesh(LAYOUTS[1]))
    assert sorted(results) == [0, 1, 2, 3] and len({*results.values()}) == 1


def test_every_device_computes_another_shard() -> None:
    mesh = make_mesh(LAYOUTS[1])
    there = rotated(mesh)
    assert {*there.devices.flat} == {*mesh.devices.flat}
    assert not any(a == b for a, b in zip(mesh.devices.flat, there.devices.flat, strict=True))
    assert (there.axis_names, there.axis_types) == (mesh.axis_names, mesh.axis_types)


def test_one_device_is_said_to_show_less(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train(dataclasses.replace(job(tmp_path), run=REPLAYED))
    assert "only errors that do not repeat are detected" in caplog.text


def test_a_device_that_computes_wrong_is_named() -> None:
    text = describe(7, {1: 0.5, 2: 0.25}, ["a", "b", "c"], ["c", "a", "b"], ["b"])
    first, *shards, last = text.splitlines()
    assert first.startswith("Step 7 gives a different state")
    assert shards == ["  shard 1: on b, then on a: 0.5 of the update apart",
                      "  shard 2: on c, then on b: 0.25 of the update apart"]  # fmt: skip
    assert last.startswith("  b computes wrong results.  Replace it")


def test_the_results_of_the_minority_are_odd() -> None:
    assert replay.odd_ones({0: (1.5,), 1: (1.5,), 2: (7.0,), 3: (1.5,)}) == [2]
    assert replay.odd_ones({0: (1.5,), 1: (7.0,)}) == []
    assert [replay.share(*x) for x in ((0.0, 0.0), (1.0, 4.0), (1.0, 0.0))] == [0, 0.25, math.inf]
