"""Checkpoints: what is saved comes back, under any layout, or an error says why not."""

import contextlib
import functools
import gc
import inspect
import os
import resource
import signal
import socket
import subprocess
import sys
import textwrap
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tensorstore
from jax.sharding import AxisType, Mesh, NamedSharding
from orbax.checkpoint._src.serialization import tensorstore_utils

from configs.errors import RunError, UserError
from tests.clouds import on_both
from trainer.checkpoints import integrity
from trainer.checkpoints.manager import Checkpoints

Tree = Any
P = jax.P
REPOSITORY = Path(__file__).parents[3]

needs_8_devices = pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")


def make_mesh(*sizes: int) -> Mesh:
    devices = jax.devices()[: int(np.prod(sizes))]
    return jax.make_mesh(
        sizes, ("data", "model")[: len(sizes)], (AxisType.Explicit,) * len(sizes), devices=devices
    )


def make_state(mesh: Mesh, seed: int = 0, width: int = 32, step: int = 0) -> Tree:
    """A small state with everything that optax puts in one: tuples, empty states, counts."""
    rng = np.random.default_rng(seed)
    spec = P(*mesh.axis_names) if mesh.devices.size > 1 else P()
    model = P(mesh.axis_names[-1])

    def put(shape: tuple[int, ...], spec: jax.P) -> jax.Array:
        array = rng.normal(size=shape).astype(np.float32)
        return jnp.asarray(jax.device_put(array, NamedSharding(mesh, spec)))

    params = {
        "embed_VD": put((48, width), model),
        "decoder": {"layers_N": {"wi_DF": put((width, 16), spec), "scale_D": put((width,), P())}},
    }
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    with jax.set_mesh(mesh):
        opt_state = optimizer.init(params)
    whole = NamedSharding(mesh, P())
    state = {"params": params, "opt_state": opt_state, "step": jnp.int32(step)}
    return jax.tree.map(lambda a: jax.device_put(a, whole) if a.ndim == 0 else a, state)


def abstract(state: Tree) -> Tree:
    return jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), state
    )


def assert_same(found: Tree, expected: Tree) -> None:
    assert str(jax.tree.structure(found)) == str(jax.tree.structure(expected))
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), found, expected
    )


def is_same(found: Tree, expected: Tree) -> bool:
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    return all(np.array_equal(np.asarray(a), np.asarray(b)) for a, b in pairs)


@pytest.fixture
def three(tmp_path: Path) -> Iterator[Checkpoints]:
    """Checkpoints of steps 10, 20 and 30, each with other weights."""
    with Checkpoints(tmp_path) as checkpoints:
        for step in (10, 20, 30):
            checkpoints.save(step, make_state(make_mesh(1), seed=step, step=step))
        checkpoints.wait()
        yield checkpoints


def data_file(checkpoints: Checkpoints, step: int) -> Path:
    """The file that holds most of a checkpoint."""
    files = Path(checkpoints.folder / str(step)).rglob("*")
    return max((file for file in files if file.is_file()), key=lambda file: file.stat().st_size)


# What is saved comes back


@needs_8_devices
@pytest.mark.parametrize("sizes", [(1,), (8,), (4, 2)])
def test_a_state_moves_to_any_mesh(tmp_path: Path, sizes: tuple[int, ...]) -> None:
    saved = make_state(make_mesh(2, 4), seed=1, step=7)
    other = make_state(make_mesh(*sizes), seed=2)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(7, saved)
        checkpoints.wait()
        computed, step = checkpoints.restore(abstract(other))
    assert step == 7
    assert_same(computed, saved)
    jax.tree.map(
        lambda a, b: a.sharding == b.sharding or pytest.fail(str(a.sharding)), computed, other
    )


@needs_8_devices
def test_the_state_may_be_donated_while_it_is_saved(tmp_path: Path) -> None:
    mesh = make_mesh(2, 4)
    state = make_state(mesh, width=4096)

    @functools.partial(jax.jit, donate_argnums=0)
    def train(state: Tree) -> Tree:
        return jax.tree.map(lambda a: a * 2 + 1, state)

    with jax.set_mesh(mesh), Checkpoints(tmp_path, keep_last=9) as checkpoints:
        copies = {}
        for step in range(1, 5):
            copies[step] = jax.tree.map(lambda a: np.array(a, copy=True), state)
            checkpoints.save(step, state)
            for _ in range(3):
                state = train(state)
        checkpoints.wait()
        for step, expected in copies.items():
            computed, _ = checkpoints.restore(abstract(state), step)
            assert_same(computed, expected)
            jax.block_until_ready(train(computed))  # what was read may be donated too


def test_nothing_is_made_before_a_save(tmp_path: Path) -> None:
    with Checkpoints(tmp_path) as checkpoints:
        assert (checkpoints.steps(), checkpoints.latest, checkpoints.best) == ([], None, None)
        with pytest.raises(UserError, match=r"checkpoints: no checkpoint\.  Copy it back"):
            checkpoints.restore(abstract(make_state(make_mesh(1))))
    assert list(tmp_path.iterdir()) == []


def test_weights_alone_are_read_without_the_slots(tmp_path: Path) -> None:
    state = make_state(make_mesh(1), width=4096)
    state["opt_state"] = make_state(make_mesh(1), seed=1, width=4096)["params"]  # no easy zeros
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state)
        checkpoints.wait()
        before = bytes_read()
        params = checkpoints.restore_params(abstract(state["params"]), 1)
        read = bytes_read() - before
    assert_same(params, state["params"])
    size = sum(a.nbytes for a in jax.tree.leaves(params))
    assert size * 0.5 < read < size * 1.2


def bytes_read() -> int:
    metrics = tensorstore.experimental_collect_matching_metrics(
        "/tensorstore/kvstore/file/bytes_read"
    )
    return sum(value["value"] for metric in metrics for value in metric["values"])


def test_average_is_the_mean(three: Checkpoints) -> None:
    state = make_state(make_mesh(1))
    mean = three.average([10, 20, 30], abstract(state["params"]))
    weights = [make_state(make_mesh(1), seed=step)["params"]["embed_VD"] for step in (10, 20, 30)]
    np.testing.assert_allclose(mean["embed_VD"], np.mean(np.stack(weights), axis=0), rtol=1e-6)
    assert str(jax.tree.structure(mean)) == str(jax.tree.structure(state["params"]))


def test_average_adds_in_float32(tmp_path: Path) -> None:
    mesh = make_mesh(1)
    values = [256.0, 1.0, 1.0, 2.0]  # in bfloat16, 256 + 1 is 256
    with Checkpoints(tmp_path, keep_last=4) as checkpoints:
        for step, value in enumerate(values):
            weight = jax.device_put(jnp.full((3,), value, jnp.bfloat16), NamedSharding(mesh, P()))
            checkpoints.save(step, {"params": {"scale_D": weight}})
        checkpoints.wait()
        mean = checkpoints.average(range(4), {"scale_D": abstract(weight)})
    assert mean["scale_D"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(mean["scale_D"].astype(np.float32), 65.0)


def test_describe_lists_every_array(three: Checkpoints) -> None:
    table = three.describe(20)
    assert table["params/embed_VD"] == jax.ShapeDtypeStruct((48, 32), jnp.float32)
    assert table["params/embed_VD"].size == 48 * 32
    assert (table["step"].size, table["step"].dtype) == (1, np.int32)
    assert len(table) == len(jax.tree.leaves(make_state(make_mesh(1))))


# Which are kept


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    state = make_state(make_mesh(1))
    with Checkpoints(tmp_path, keep_last=2) as checkpoints:
        for step, loss in enumerate([5.0, 2.0, 3.0, float("nan"), None]):
            checkpoints.save(step, state, loss)
    with Checkpoints(tmp_path, keep_last=2) as checkpoints:  # another run goes on
        assert (checkpoints.steps(), checkpoints.best, checkpoints.latest) == ([1, 3, 4], 1, 4)
        checkpoints.save(5, state, 2.5)
        checkpoints.save(6, state, 1.5)
        checkpoints.save(7, state, 4.0)
        checkpoints.save(8, state, 4.0)
        checkpoints.wait()
        assert (checkpoints.steps(), checkpoints.best) == ([6, 7, 8], 6)


def test_a_higher_metric_may_be_better(tmp_path: Path) -> None:
    with Checkpoints(tmp_path, keep_last=1, higher_is_better=True) as checkpoints:
        for step, bleu in enumerate([1.0, 9.0, 3.0]):
            checkpoints.save(step, make_state(make_mesh(1)), bleu)
        checkpoints.wait()
        assert (checkpoints.steps(), checkpoints.best) == ([1, 2], 1)
    assert Checkpoints(tmp_path).best == 1  # whoever reads them


def test_a_metric_of_another_kind_is_no_rival(tmp_path: Path) -> None:
    """A run may change from BLEU to the loss: its checkpoints of before are not the best."""
    for steps, higher in ((((1, 20.0), (2, 30.0)), True), (((3, 2.0), (4, 1.5), (5, 1.7)), False)):
        with Checkpoints(tmp_path, keep_last=9, higher_is_better=higher) as checkpoints:
            for step, metric in steps:
                checkpoints.save(step, make_state(make_mesh(1)), metric)
    every = Checkpoints(tmp_path)
    assert every.best == 4 and every.best_of([1, 2]) == 2


def test_without_keep_best_only_the_newest_are_kept(tmp_path: Path) -> None:
    with Checkpoints(tmp_path, keep_last=1, keep_best=False) as checkpoints:
        for step, loss in enumerate([1.0, 9.0, 3.0]):
            checkpoints.save(step, make_state(make_mesh(1)), loss)
        checkpoints.wait()
        assert checkpoints.steps() == [2]


def test_other_weights_of_the_same_step_are_another_checkpoint(tmp_path: Path) -> None:
    """Also after the folder was moved, and where the average is of more steps."""
    mesh, identities = make_mesh(1, 1), []
    for seed in (0, 1):
        folder = tmp_path / str(seed)
        with Checkpoints(folder) as checkpoints:
            for step in (1, 2):
                checkpoints.save(step, make_state(mesh, seed))
        identities += [Checkpoints(folder).identity(steps) for steps in ([1], [2], [1, 2])]
    assert len(set(identities)) == 6
    (tmp_path / "1").rename(tmp_path / "moved")
    assert Checkpoints(tmp_path / "moved").identity([1, 2]) == identities[-1]


def test_a_run_that_goes_back_sets_its_old_future_aside(
    three: Checkpoints, log_lines: list[str]
) -> None:
    state, _ = three.restore(abstract(make_state(make_mesh(1))), step=10)
    three.save(15, state)
    three.wait()
    assert three.steps() == [10, 15]
    assert ["20" in log_lines[0], "30" in log_lines[1]] == [True, True]
    aside = [path.name for path in three.folder.iterdir() if "set-aside" in path.name]
    assert len(aside) == 2


def test_saving_a_step_again_changes_nothing(three: Checkpoints, log_lines: list[str]) -> None:
    before = data_file(three, 30).stat().st_mtime_ns
    three.save(30, make_state(make_mesh(1), seed=99))
    three.wait()
    with Checkpoints(three.folder.parent) as again:  # the run is over, and is started again
        state, step = again.restore(abstract(make_state(make_mesh(1))))
        again.save(step, state)
    assert data_file(three, 30).stat().st_mtime_ns == before
    assert (three.steps(), log_lines) == ([10, 20, 30], [])


# What is damaged is not used


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def flip(file: Path) -> None:
    contents = bytearray(file.read_bytes())
    contents[len(contents) // 2] ^= 1
    file.write_bytes(contents)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (truncate, "of .* bytes"),
    "empty": (lambda file: os.truncate(file, 0), "has 0 of"),
    "missing": (Path.unlink, "missing"),
    "flipped": (flip, "not what was saved|unreadable"),
}
FILES = ["manifest.json", "_METADATA", "manifest.ocdbt", "d/*", "ocdbt.process_0/d/*"]


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("pattern", FILES)
def test_a_damaged_checkpoint_is_passed_over(
    three: Checkpoints, log_lines: list[str], pattern: str, damage: str
) -> None:
    spoil, _ = DAMAGES[damage]
    files = Path(three.folder / "30" / "state").glob(pattern)
    spoil(max(files, key=lambda file: file.stat().st_size))
    expected = make_state(make_mesh(1), seed=20, step=20)
    with Checkpoints(three.folder.parent) as resumed:
        state, step = resumed.restore(abstract(expected))
        assert step == 20
        assert_same(state, expected)
        (line,) = log_lines
        assert line.startswith("checkpoint 30 is damaged (") and "using step 20" in line
        resumed.save(25, state)
        resumed.wait()
        assert resumed.steps() == [10, 20, 25]
        assert "checkpoint 30 is set aside" in log_lines[1]


@pytest.mark.parametrize("damage", DAMAGES)
def test_the_damaged_file_is_named(three: Checkpoints, log_lines: list[str], damage: str) -> None:
    spoil, words = DAMAGES[damage]
    file = data_file(three, 30)
    spoil(file)
    three.restore(abstract(make_state(make_mesh(1))))
    assert file.name in log_lines[0]
    with pytest.raises(
        UserError, match=rf"(?s)step 30: .*({words}).*choose one of steps \[10, 20\]"
    ):
        three.restore_params(abstract(make_state(make_mesh(1))["params"]), 30)


@pytest.mark.few(1)
@pytest.mark.parametrize("checksums", [True, False])
def test_a_flipped_bit_of_a_large_file_is_noticed_by_the_chunk(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    checksums: bool,
) -> None:
    """The broken variant: without a checksum of each chunk, Orbax restores a changed weight."""
    if not checksums:
        plain = inspect.unwrap(tensorstore_utils._build_zarr3_metadata)
        monkeypatch.setattr(tensorstore_utils, "_build_zarr3_metadata", plain)
        monkeypatch.setattr(integrity, "checksum_chunks", lambda: None)
    monkeypatch.setattr(integrity, "CHECKSUM_UP_TO_BYTES", 50_000)
    mesh = make_mesh(1)
    states = {step: make_state(mesh, width=512, seed=step) for step in (1, 2)}
    with Checkpoints(tmp_path) as checkpoints:
        for step, state in states.items():
            checkpoints.save(step, state)
    with Checkpoints(tmp_path) as checkpoints:
        file = data_file(checkpoints, 2)
        assert file.stat().st_size > 50_000
        contents = file.read_bytes()
        undamaged = checkpoints.restore(abstract(states[2]))
        wrong = 0
        # The reader has restored the undamaged one.  A bit that belongs to no array may go unseen.
        for place in np.linspace(0, 8 * len(contents) - 1, 12, dtype=int):
            changed = bytearray(contents)
            changed[place // 8] ^= 1 << place % 8
            file.write_bytes(changed)
            state, step = checkpoints.restore(abstract(states[2]))
            assert (checkpoints.damage(2, reads_arrays=True) is None) == (step == 2)
            if step == 2:
                wrong += not is_same(state, undamaged[0])
            else:
                assert is_same(state, states[1])
    gc.collect()  # prints what Orbax left, if anything
    lines = capsys.readouterr().err.splitlines()  # Meshloom's, where an earlier test shows its log
    noise = [line for line in lines if not line.startswith("checkpoint 2 is damaged")]
    assert ((wrong == 0), noise) == (checksums, [])


def test_orbax_bookkeeping_may_be_lost(three: Checkpoints, log_lines: list[str]) -> None:
    os.truncate(three.folder / "30" / "_CHECKPOINT_METADATA", 3)
    with Checkpoints(three.folder.parent) as resumed:
        state, step = resumed.restore(abstract(make_state(make_mesh(1))))
        resumed.save(40, state)
        resumed.wait()
        assert (step, resumed.steps(), log_lines) == (30, [20, 30, 40], [])


def test_if_all_are_damaged_each_reason_is_told(three: Checkpoints) -> None:
    for step in (10, 20, 30):
        truncate(data_file(three, step))
    with pytest.raises(UserError) as error:
        three.restore(abstract(make_state(make_mesh(1))))
    for words in (str(three.folder), "step 10: ", "step 20: ", "step 30: ", "new model_dir"):
        assert words in str(error.value)


def test_a_step_that_is_not_there(three: Checkpoints) -> None:
    with pytest.raises(
        UserError, match=r"step 99: there is none.*choose one of steps \[10, 20, 30\]"
    ):
        three.restore(abstract(make_state(make_mesh(1))), 99)
    with pytest.raises(UserError, match="step 99: there is none"):
        three.describe(99)


def test_another_model_is_refused_weight_by_weight(
    three: Checkpoints, log_lines: list[str]
) -> None:
    other = abstract(make_state(make_mesh(1), width=24))
    other["params"]["head_DV"] = other["params"].pop("embed_VD")
    with pytest.raises(UserError) as error:
        three.restore(other)
    text = str(error.value)
    assert "Checkpoint 30" in text and "arrays differ" in text and log_lines == []
    assert "params/decoder/layers_N/wi_DF: saved (32, 16), expected (24, 16)" in text
    assert "params/embed_VD: saved (48, 32), expected -" in text
    assert "params/head_DV: saved -, expected (48, 24)" in text
    other = {f"weight_{i}": other["params"]["head_DV"] for i in range(40)}
    with pytest.raises(UserError, match=r"\.\.\. and 33 more") as error:
        three.restore_params(other, 30)
    assert len(str(error.value).splitlines()) == 13


# What goes wrong while saving


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", tmp_path]).returncode:
        pytest.skip("only root can mount a small file system")
    try:
        check_failed_save(tmp_path, lambda: None, "the disk is full")
    finally:
        subprocess.run(["umount", "--lazy", tmp_path], check=True)


def test_a_limit_on_the_size_of_files_is_named(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        limit = functools.partial(stack.enter_context, no_large_files())
        check_failed_save(
            tmp_path, limit, r"the file exceeds the size limit of the shell \(`ulimit -f`\)"
        )


@contextlib.contextmanager
def no_large_files() -> Iterator[None]:
    """Makes writing more than a little to any file fail."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def check_failed_save(folder: Path, fill: Callable[[], object], reason: str) -> None:
    small, large = make_state(make_mesh(1)), make_state(make_mesh(1), width=16384)
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(1, small)
        checkpoints.wait()
        fill()
        checkpoints.save(2, large)  # it fails later, in the background
        words = f"saving step 2 to .*checkpoints failed: {reason}.*; the last good"
        with pytest.raises(RunError, match=words + " checkpoint is step 1"):
            checkpoints.save(3, large)
        assert checkpoints.steps() == [1]
        checkpoints.save(4, small)
        checkpoints.wait()
        assert sorted(path.name for path in checkpoints.folder.iterdir()) == ["1", "4"]
        assert checkpoints.restore(abstract(small))[1] == 4


def test_an_error_in_the_background_surfaces_at_the_end(
    tmp_path: Path, log_lines: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    large = make_state(make_mesh(1), width=16384)

    def save_and_leave(step: int, error: Exception | None = None) -> None:
        with Checkpoints(tmp_path) as checkpoints:
            checkpoints.save(step, large)
            if error is not None:
                raise error

    with no_large_files():
        with pytest.raises(RunError, match=r"step 1 .*last good checkpoint is none"):
            save_and_leave(1)
        with pytest.raises(ZeroDivisionError):  # the first error is the one that is seen
            save_and_leave(2, ZeroDivisionError())
    assert "the file exceeds the size limit" in log_lines[0]
    assert not [record for record in caplog.records if record.exc_info]  # of Orbax's threads


def test_a_failed_save_is_explained_before_its_files_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inodes that it used up would be free again."""
    names = list[str]()

    def explain(folder: Path, error: Exception) -> str:
        names.extend(path.name for path in folder.iterdir())
        return "no room"

    monkeypatch.setattr("trainer.checkpoints.manager.failure", explain)
    with (
        no_large_files(),
        pytest.raises(RunError, match="failed: no room; the last good checkpoint is none"),
        Checkpoints(tmp_path) as checkpoints,
    ):
        checkpoints.save(1, make_state(make_mesh(1), width=16384))
    assert any(name.startswith("1.orbax-checkpoint-tmp") for name in names)


def test_a_renamed_checkpoint_is_no_other_step(tmp_path: Path, log_lines: list[str]) -> None:
    state = make_state(make_mesh(1))
    with Checkpoints(tmp_path) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, state)
    (checkpoints.folder / "2").rename(checkpoints.folder / "7")
    damage = "it is step 2: rename its folder to 2"
    assert Checkpoints(tmp_path).damage(7) == damage
    assert Checkpoints(tmp_path).restore(abstract(state))[1] == 1
    assert log_lines == [f"checkpoint 7 is damaged ({damage}); using step 1"]
    (checkpoints.folder / "7").rename(checkpoints.folder / "2")
    assert Checkpoints(tmp_path).restore(abstract(state))[1] == 2


def test_a_state_that_is_saved_does_not_stay_in_memory(tmp_path: Path) -> None:
    state = make_state(make_mesh(1))
    arrays = [weakref.ref(array) for array in jax.tree.leaves(state)]
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state)
        checkpoints.wait()
        del state
        gc.collect()
        assert not any(array() is not None for array in arrays)


def test_an_error_in_the_background_surfaces_when_asked(tmp_path: Path) -> None:
    with no_large_files(), Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, make_state(make_mesh(1), width=16384))
        with pytest.raises(RunError, match=r"step 1 to .*failed: the file exceeds the size limit"):
            for _ in range(1000):
                checkpoints.check()
                time.sleep(0.02)


def run_python(program: str, *arguments: object, wait: bool = True) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program), *map(str, arguments)],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(REPOSITORY), *sys.path])},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if wait:
        process.communicate()
    return process


def test_a_killed_save_leaves_nothing_that_counts(tmp_path: Path) -> None:
    program = """
        import os, signal, sys
        import jax, orbax.checkpoint
        jax.config.update("jax_platforms", "cpu")
        from tests.trainer.checkpoints.test_manager import make_mesh, make_state
        from trainer.checkpoints.manager import Checkpoints

        checkpoints = Checkpoints(sys.argv[1])
        checkpoints.save(1, make_state(make_mesh(1), seed=1))
        checkpoints.wait()
        orbax.checkpoint.PyTreeCheckpointHandler.finalize = (
            lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        )
        checkpoints.save(2, make_state(make_mesh(1), seed=2))
        checkpoints.wait()
    """
    assert run_python(program, tmp_path).returncode == -signal.SIGKILL
    folder = tmp_path / "checkpoints"
    assert any("tmp" in path.name for path in folder.iterdir())
    with Checkpoints(tmp_path) as checkpoints:
        state, step = checkpoints.restore(abstract(make_state(make_mesh(1))))
        assert step == 1
        checkpoints.save(2, state)
    assert sorted(path.name for path in folder.iterdir()) == ["1", "2"]


def test_host_memory_does_not_grow_with_saves(tmp_path: Path) -> None:
    state = make_state(make_mesh(1), width=8192)
    size = sum(a.nbytes for a in jax.tree.leaves(state))
    resident = []
    with Checkpoints(tmp_path, keep_last=1) as checkpoints:
        for step in range(25):
            checkpoints.save(step, state)
            checkpoints.wait()
            resident.append(int(Path("/proc/self/statm").read_text().split()[1]) * 4096)
    assert resident[-1] - resident[4] < 5 * size  # 20 copies, if each save left one


@needs_8_devices
def test_two_processes_restore_what_one_saved_and_back(tmp_path: Path) -> None:
    program = """
        import sys
        import jax
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", 2)
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        folder, address, index = sys.argv[1:]
        jax.distributed.initialize(address, num_processes=2, process_id=int(index))
        from tests.trainer.checkpoints.test_manager import abstract, make_mesh, make_state
        from trainer.checkpoints.manager import Checkpoints

        mesh = make_mesh(2, 2)
        with jax.set_mesh(mesh), Checkpoints(folder) as checkpoints:
            state, step = checkpoints.restore(abstract(make_state(mesh)))
            assert step == 1, step
            checkpoints.save(2, jax.jit(lambda s: jax.tree.map(lambda a: a + 1, s))(state))
            state, step = checkpoints.restore(abstract(state))
            assert step in (1, 2), step
    """
    state = make_state(make_mesh(8), seed=5)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state)
        checkpoints.save(2, state)
    truncate(data_file(checkpoints, 2))
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    pair = [run_python(program, tmp_path, address, index, wait=False) for index in (0, 1)]
    log_lines = [process.communicate(timeout=120)[0] for process in pair]
    assert [process.returncode for process in pair] == [0, 0], "\n".join(log_lines)
    assert "checkpoint 2 is damaged" in log_lines[0] and "checkpoint 2 is set aside" in log_lines[0]
    with Checkpoints(tmp_path) as checkpoints:
        computed, step = checkpoints.restore(abstract(state))
    assert step == 2
    assert_same(computed, jax.tree.map(lambda a: np.asarray(a) + 1, state))


@pytest.mark.few(1)
@on_both
def test_a_damaged_checkpoint_of_remote_storage_is_passed_over_and_set_aside(
    there: Path, log_lines: list[str]
) -> None:
    states = {step: make_state(make_mesh(1), seed=step) for step in (10, 20, 30)}
    with Checkpoints(there) as checkpoints:
        for step in (10, 20):
            checkpoints.save(step, states[step])
        checkpoints.wait()
        (there / "checkpoints/20/state/_METADATA").write_text("{}")
        (there / "checkpoints/25/state/array").write_text("of a save that was killed")
        state, step = checkpoints.restore(abstract(states[10]))
        assert step == 10 and is_same(state, states[10])
        checkpoints.save(30, states[30])
    assert "_METADATA" in log_lines[0] and checkpoints.steps() == [10, 30]
    names = sorted(path.name.partition("-2")[0] for path in (there / "checkpoints").iterdir())
    assert names == [".keep", "10", "20.set-aside", "30"]
