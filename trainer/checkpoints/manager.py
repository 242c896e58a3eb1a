"""Saves checkpoints in the background, verifies them, and restores them under any layout.

A checkpoint's step is the number of updates so far.  Orbax reads and writes the arrays; this
module chooses which checkpoints to keep, and recognizes damaged ones.
"""

import contextlib
import dataclasses
import functools
import json
import logging
import math
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from flax import traverse_util
from orbax.checkpoint import checkpoint_managers as policies

from configs.errors import RunError, UserError, one_line
from configs.paths import absolute, is_remote, path_of
from data.storage import folders, remote
from data.storage.files import describe_full
from layouts.axes import leaf_path
from trainer.checkpoints import integrity, s3
from trainer.checkpoints.integrity import DamagedCheckpoint
from trainer.multihost import gather
from trainer.resume.history import CHECKPOINTS, ITEM, amend_record, starts

Tree = Any
Score = tuple[float | None, bool]  # a metric, if there is one, and whether a higher one is better
Described = Mapping[str, jax.ShapeDtypeStruct]  # arrays of a checkpoint, by path

OPTIONAL = "spikes"
"""The part of a state that is missing in checkpoints from before a run enabled it."""
RAISED = ("raised an exception", "background save thread", "Save Finalize", "Checkpointer failed")
"""Messages that Orbax logs, with tracebacks, in each thread that an error passes through."""
LISTED = 10
"""The most arrays that an error lists."""

logger = logging.getLogger(__name__)
logging.getLogger("absl").addFilter(lambda record: not any(x in str(record.msg) for x in RAISED))


@dataclasses.dataclass
class Checkpoints(contextlib.AbstractContextManager["Checkpoints"]):
    """Saves and restores the checkpoints in `<model_dir>/checkpoints`.  Only `save` changes them.

    Keeps the newest `keep_last`, and the one with the best metric as well.  Each checkpoint records
    whether a higher metric is better; `save` records `higher_is_better`.  As a context manager,
    waits at the end for a save in progress.
    """

    model_dir: epath.PathLike
    keep_last: int = 3
    keep_best: bool = True
    higher_is_better: bool = False

    def __post_init__(self) -> None:
        self.folder = epath.Path(absolute(path_of(self.model_dir))) / CHECKPOINTS
        # Remote storage cannot rename, so a file marks a checkpoint as complete.
        by_file = ocp.path.atomicity.CommitFileTemporaryPath
        self._commit = by_file if is_remote(self.folder) else None
        if str(self.folder).startswith(s3.SCHEME):
            s3.add_s3()
        self._manager: ocp.CheckpointManager | None = None
        self._reader = ocp.PyTreeCheckpointHandler()
        self._current: int | None = None  # the step saved or restored last
        self._noted: int | None = None  # the last saved step in the run's record
        self._damaged: list[int] = []
        self._scores: dict[int, Score] = {}

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self.wait()
        except RunError as failure:
            if error is None:
                raise
            logger.warning(str(failure))  # the error already on its way is the one to raise
        finally:
            self._close()
            self._reader.close()

    # Which there are

    def steps(self) -> list[int]:
        """Returns the steps of all finished checkpoints, in order."""
        names = ocp.path.step.standard_name_format(temporary_path_cls=self._commit)
        steps = sorted(name.step for name in names.find_all(self.folder))
        if not steps:
            remote.check_bucket(path_of(self.folder))
        return steps

    @property
    def latest(self) -> int | None:
        return max(self.steps(), default=None)

    @property
    def best(self) -> int | None:
        """Returns the step with the best metric, the later of equals; None if none has a metric."""
        return self.best_of(self.steps())

    def best_of(self, steps: Sequence[int]) -> int | None:
        """Returns the best step among those whose metrics have the direction of the last one."""
        scores = ((step, *self._score(step)) for step in sorted(steps))
        known = [(step, m, higher) for step, m, higher in scores if m is not None]
        signed = [(m if up else -m, step) for step, m, up in known if up == known[-1][2]]
        return max(signed, default=(0, None))[1]

    def files(self, step: int) -> list[tuple[str, int, int]]:
        """Lists the files of a checkpoint that exist: name, size, time of the last change."""
        listed = list[tuple[str, int, int]]()
        with contextlib.suppress(DamagedCheckpoint):
            for name in integrity.read_manifest(self._path(step)).files:
                with contextlib.suppress(OSError, ValueError):
                    stat = (self._path(step) / name).stat()
                    listed.append((name, stat.length, stat.mtime))
        return listed

    def identity(self, steps: Sequence[int]) -> str:
        """Returns a checksum of checkpoints' lists of files, which identifies the checkpoints."""
        files = [sorted(integrity.read_manifest(self._path(step)).files.items()) for step in steps]
        return f"{zlib.crc32(json.dumps(files).encode()):08x}"

    def describe(self, step: int) -> Described:
        """Describes every array of a checkpoint by its path, without loading any."""
        try:
            return self._saved(step)
        except DamagedCheckpoint as reason:
            raise self._unusable({step: str(reason)}) from reason

    def damage(self, step: int, *, reads_arrays: bool = False) -> str | None:
        """Describes how a checkpoint is damaged; returns None if it is complete.

        Compares only the sizes of large files, unless it also reads every array, one at a time.
        """
        try:
            arrays = self._saved(step)
            for path in arrays if reads_arrays else ():
                self._read_array(step, path, arrays[path])
        except DamagedCheckpoint as reason:
            return str(reason)
        return None

    def arrays(
        self, step: int, shapes: Mapping[str, tuple[int, ...]]
    ) -> Iterator[tuple[str, np.ndarray]]:
        """Yields arrays of these paths and shapes, one at a time, whatever their sharding."""
        try:
            saved = self._saved(step)
            self._compare(step, saved, shapes)
            for path in shapes:
                yield path, self._read_array(step, path, saved[path])
        except DamagedCheckpoint as reason:
            raise self._unusable({step: str(reason)}) from reason

    def _read_array(self, step: int, path: str, saved: jax.ShapeDtypeStruct) -> np.ndarray:
        """Reads one array, whatever its sharding, into the memory of the host."""
        tree = functools.partial(traverse_util.unflatten_dict, sep="/")
        restore_args = tree({path: ocp.RestoreArgs(restore_type=np.ndarray)})
        return self._read(step, tree({path: saved}), restore_args)[path]

    def _read(self, step: int, item: Tree, restore_args: Tree) -> dict[str, Any]:
        """Reads some arrays of a checkpoint; returns them by path."""
        args = ocp.args.PyTreeRestore(item=item, restore_args=restore_args, partial_restore=True)
        tree = integrity.read(lambda: self._reader.restore(self._path(step), args=args))
        return traverse_util.flatten_dict(tree, sep="/")

    def _path(self, step: int) -> epath.Path:
        return self.folder / str(step) / ITEM

    def _score(self, step: int) -> Score:
        """Returns the metric of a checkpoint; a damaged one has none."""
        if step not in self._scores:
            try:
                manifest = integrity.read_manifest(self._path(step))
            except DamagedCheckpoint:
                return None, self.higher_is_better
            self._scores[step] = manifest.metric, manifest.higher_is_better
        return self._scores[step]

    # Saving

    def save(self, step: int, state: Tree, metric: float | None = None) -> None:
        """Starts to save; the state may be donated at once.  Skips a step that is already saved.

        Sets aside damaged checkpoints, and later ones from before the run went back.
        """
        self.wait()
        if step == self._current:
            return
        self._set_aside([old for old in self.steps() if old >= step or old in self._damaged])
        metric = metric if metric is not None and math.isfinite(metric) else None
        self._current = step
        self._scores[step] = metric, self.higher_is_better
        try:
            self._manager = self._manager or self._open(state)
            item = integrity.Save(nested(state))
            item.metric, item.higher_is_better = metric, self.higher_is_better
            item.run, item.step = self._record, step
            self._manager.save(step, args=ocp.args.Composite(**{ITEM: item}), force=True)
        except Exception as error:
            raise self._failed(error) from error

    def wait(self) -> None:
        """Waits until the last save is on disk; raises its error if it failed."""
        try:
            if self._manager is not None:
                self._manager.wait_until_finished()
                if self._current != self._noted and jax.process_index() == 0:
                    amend_record(path_of(self.model_dir), saved=self._current or 0)
                self._noted = self._current
        except Exception as error:
            raise self._failed(error) from error

    def wait_for_latest(self) -> int | None:
        """Returns the newest checkpoint, after waiting for a save in progress."""
        self.wait()
        return self.latest

    def check(self) -> bool:
        """Returns whether the last save has ended; raises its error.  Does not wait."""
        if self._manager is not None and self._manager.is_saving_in_progress():
            return False
        self.wait()
        return True

    def _open(self, state: Tree) -> ocp.CheckpointManager:
        integrity.checksum_chunks()
        integrity.wait_for_writes()
        records = starts(path_of(self.model_dir))
        self._record = records[-1].dump() if records else None
        if is_remote(self.folder):
            # Orbax removes the rest of a killed save and then lists the folder.  Only this object,
            # which nothing reads, keeps the folder in existence.
            if jax.process_index() == 0:
                (self.folder / ".keep").write_bytes(b"")
            gather(None)  # all wait until it is there
        kept = policies.AnyPreservationPolicy([policies.LatestN(self.keep_last), _KeepBest(self)])
        options = ocp.CheckpointManagerOptions(
            preservation_policy=kept,
            cleanup_tmp_directories=True,
            temporary_path_class=self._commit,
            save_root_metadata=False,
            lightweight_initialize=True,  # reads nothing that may be damaged
        )
        arrays = ocp.type_handlers.ArrayHandler(
            # For smaller arrays, replicas that each write a slice cost more than they save: a
            # compilation per shape and device.
            min_slice_bytes_for_replica_parallel=1 << 20,
            # The array's devices on this machine are of no use on another.
            enable_write_sharding_file=False,
        )
        registry = ocp.type_handlers.create_type_handler_registry(
            (jax.Array, arrays), (integrity.StreamedArray, integrity.StreamedHandler())
        )
        # Compressed data takes memory until it is written: an eighth of the state at a time.
        sizes = [math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(state)]
        limit_gb = max(0.1, 2e-9 * max(sizes), 1e-9 * sum(sizes) / (8 * jax.process_count()))
        handler = integrity.ListingHandler(
            use_zarr3=True, type_handler_registry=registry, save_concurrent_gb=limit_gb
        )
        return ocp.CheckpointManager(self.folder, options=options, item_handlers={ITEM: handler})

    def _close(self) -> None:
        manager, self._manager = self._manager, None
        if manager is not None:
            manager.close()

    def _failed(self, error: Exception) -> RunError:
        """Removes the remains of the failed save, and returns an error that explains it."""
        step, self._current, self._manager = self._current, None, None
        reason = failure(self.folder, error)  # before the remains are removed
        if jax.process_index() == 0:
            for unfinished in self.folder.glob(f"{step}.orbax-checkpoint-tmp*"):
                # Other writes may still be under way; then a later save removes what they leave.
                with contextlib.suppress(OSError):
                    unfinished.rmtree()
        last = "none" if self.latest is None else f"step {self.latest}"
        what = f"saving step {step} to {self.folder} failed"
        return RunError(f"{what}: {reason}; the last good checkpoint is {last}")

    def _set_aside(self, steps: Sequence[int]) -> None:
        gather(None)  # none is renamed before all processes have listed them
        for step in steps:
            self._scores.pop(step, None)
            if jax.process_index() == 0:
                aside = self.folder / f"{step}.set-aside-{time.strftime('%Y%m%d-%H%M%S')}"
                folders.rename(path_of(self.folder / str(step)), path_of(aside))
                logger.warning("checkpoint %d is set aside as %s", step, aside)
        gather(None)  # all wait until they are renamed
        self._damaged = []
        if steps:
            self._close()  # it caches the steps that it saw

    # Restoring

    def restore(self, abstract_state: Tree, step: int | None = None) -> tuple[Tree, int]:
        """Restores a step, or the newest undamaged one, with the given shardings.

        The state has no `OPTIONAL` part if the checkpoint has none.
        """
        self.wait()
        steps = self.steps()[::-1] if step is None else [step]
        state, self._current, self._damaged = self._first_undamaged(abstract_state, steps)
        return state, self._current

    def restore_params(self, abstract_params: Tree, step: int) -> Tree:
        """Returns the weights of a checkpoint without reading its opt_state."""
        return self._first_undamaged({"params": abstract_params}, [step])[0]["params"]

    def average(self, steps: Sequence[int], abstract_params: Tree) -> Tree:
        """Averages the weights of several checkpoints, adding one at a time in float32."""
        add = jax.jit(lambda total, params: jax.tree.map(jnp.add, total, params), donate_argnums=0)
        float32 = jax.tree.map(lambda leaf: leaf.update(dtype=jnp.float32), abstract_params)
        total = self.restore_params(float32, steps[0])
        for step in steps[1:]:
            total = add(total, self.restore_params(float32, step))
        return jax.tree.map(
            lambda weight, leaf: (weight / len(steps)).astype(leaf.dtype), total, abstract_params
        )

    def _first_undamaged(self, abstract: Tree, steps: Sequence[int]) -> tuple[Tree, int, list[int]]:
        damaged: dict[int, str] = {}
        for step in steps:
            try:
                tree = self._load(abstract, step)
            except DamagedCheckpoint as reason:
                damaged[step] = str(reason)
                continue
            for bad, why in damaged.items():
                logger.warning("checkpoint %d is damaged (%s); using step %d", bad, why, step)
            return tree, step, list(damaged)
        raise self._unusable(damaged)

    def _load(self, abstract: Tree, step: int) -> Tree:
        """Reads the arrays of a checkpoint; if it is damaged, all processes raise."""
        saved = integrity.on_all_processes(lambda: self._saved(step))
        if not any(path.startswith(f"{OPTIONAL}/") for path in saved):
            abstract = {name: part for name, part in abstract.items() if name != OPTIONAL}
        leaves, item = by_path(abstract), nested(abstract)
        restore_args = ocp.checkpoint_utils.construct_restore_args(item)
        self._compare(step, saved, {path: tuple(a.shape) for path, a in leaves.items()})
        arrays = integrity.on_all_processes(lambda: self._read(step, item, restore_args))
        return jax.tree.unflatten(jax.tree.structure(abstract), [arrays[path] for path in leaves])

    def _saved(self, step: int) -> Described:
        """Verifies the files of a checkpoint, and returns the shapes and types of its arrays."""
        if not self._path(step).parent.exists():
            raise DamagedCheckpoint("there is none")
        integrity.verify(self._path(step), step)
        tree = integrity.read(lambda: self._reader.metadata(self._path(step)).tree)
        arrays = traverse_util.flatten_dict(tree, sep="/")
        return {path: jax.ShapeDtypeStruct(a.shape, a.dtype) for path, a in arrays.items()}

    def _compare(self, step: int, saved: Described, want: Mapping[str, tuple[int, ...]]) -> None:
        parts = set(map(_part, want))
        have = {path: a.shape for path, a in saved.items() if _part(path) in parts}
        wrong = [path for path in sorted({**have, **want}) if have.get(path) != want.get(path)]
        if not wrong:
            return
        if "opt_state" in parts and not any(path.startswith("opt_state/") for path in saved):
            raise UserError(
                f"Checkpoint {step} in {self.folder} contains only weights, as from an import: "
                "training cannot resume there.  Start a run in another model_dir, with "
                f"Run.start_from = {str(self.folder.parent)!r}."
            )
        lines = [
            f"Checkpoint {step} in {self.folder} belongs to another model: {len(wrong)} arrays "
            "differ.",
            *(
                f"  {p}: saved {have.get(p, '-')}, expected {want.get(p, '-')}"
                for p in wrong[:LISTED]
            ),
            *([f"  ... and {len(wrong) - LISTED} more"] if len(wrong) > LISTED else []),
            "  Use the model and optimizer that it was saved with, or another model_dir.",
        ]
        raise UserError("\n".join(lines))

    def _unusable(self, damaged: Mapping[int, str]) -> UserError:
        reasons = "; ".join(f"step {step}: {why}" for step, why in damaged.items())
        others = [step for step in self.steps() if step not in damaged]
        fix = f"choose one of steps {others}" if others else "train again, in a new model_dir"
        return UserError(f"{self.folder}: {reasons or 'no checkpoint'}.  Copy it back, or {fix}.")


@dataclasses.dataclass(frozen=True)
class _KeepBest(policies.PreservationPolicy):
    """Keeps the best checkpoint.

    Orbax's BestN reads metrics from Orbax's own file, which may be damaged.  This policy reads
    them from the manifest, and does not keep checkpoints just because they have no metric.
    """

    checkpoints: Checkpoints

    def should_preserve(
        self,
        checkpoints: Sequence[policies.PolicyCheckpointInfo],
        *,
        context: policies.PreservationContext,
    ) -> Sequence[bool]:
        steps = [info.step for info in checkpoints]
        best = self.checkpoints.best_of(steps) if self.checkpoints.keep_best else None
        return [step == best for step in steps]


def failure(folder: epath.Path, error: Exception) -> str:
    """Explains in one line why a save to a folder failed."""
    is_full = any(words in str(error) for words in ("No space left", "quota", "File too large"))
    is_local = not is_remote(folder)
    return describe_full(path_of(folder.parent), error) if is_full and is_local else one_line(error)


def by_path(tree: Tree) -> dict[str, Any]:
    """Returns the leaves of a tree by their paths."""
    return {leaf_path(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}


def _part(path: str) -> str:
    """Returns the part that a command restores as a unit: a moving average, or the first name."""
    before, average, _ = path.partition("/average/")
    return f"{before}{average}" if average else path.split("/")[0]


def nested(tree: Tree) -> Tree:
    """Returns the tree as it is on disk: dicts in place of tuples, and no empty nodes."""
    return traverse_util.unflatten_dict(by_path(tree), sep="/")
