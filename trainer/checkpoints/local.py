"""Saves and restores local checkpoints: each host keeps its shards of the newest state.

A restart loads them instead of the older checkpoint in the model directory.  The shards of a
replaced host come from replicas on other hosts.
"""

import contextlib
import itertools
import logging
import shutil
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from flax import traverse_util
from jax import lax
from jax.sharding import Mesh

from configs.errors import UserError
from configs.paths import absolute, local_path
from layouts.reduction import free_axes
from trainer.checkpoints import integrity
from trainer.checkpoints.integrity import DamagedCheckpoint
from trainer.checkpoints.manager import by_path, failure, nested
from trainer.multihost import from_first_process, gather
from trainer.processes.peers import join_names
from trainer.resume.history import ITEM, Start, starts

Tree = Any

logger = logging.getLogger(__name__)


class LocalCheckpoints(contextlib.AbstractContextManager["LocalCheckpoints"]):
    """Saves and restores the newest state of a run, which `state` describes.

    Each process has its own folder, since several processes may share a host.  A run that ends
    without an error removes it.
    """

    def __init__(self, local_dir: Path, model_dir: Path, state: Tree, mesh: Mesh):
        self._state, self._mesh = state, mesh
        index = jax.process_index()
        run = f"{model_dir.name}-{zlib.crc32(str(absolute(model_dir)).encode()):08x}"
        local_dir = local_path(local_dir, "--local_checkpoint_dir")
        self.folder = epath.Path(absolute(local_dir) / run / f"process_{index}")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"--local_checkpoint_dir={local_dir}: {error.strerror}.  Give a folder on a disk "
                "of this host, or /dev/shm, its memory."
            ) from None
        self._starts = from_first_process(lambda: unchanged_starts(starts(model_dir)))
        self._placement = placement(state, mesh)
        integrity.checksum_chunks()
        integrity.wait_for_writes()
        # Each process saves all of its shards, without barriers.
        self._processes = ocp.options.MultiprocessingOptions(
            primary_host=index, active_processes={index}, barrier_sync_key_prefix=f"local_{index}"
        )
        arrays = ocp.type_handlers.ArrayHandler(
            primary_host=index, replica_id=None, use_replica_parallel=False,
            enable_write_sharding_file=False,
        )  # fmt: skip
        registry = ocp.type_handlers.create_type_handler_registry((jax.Array, arrays))
        self._handler = integrity.ListingHandler(
            use_zarr3=True, type_handler_registry=registry, multiprocessing_options=self._processes
        )
        self._manager: ocp.CheckpointManager | None = None
        self._is_enabled = True

    def __exit__(self, kind: object, *error: object) -> None:
        self._wait()
        if kind is None:  # a regular checkpoint has the last state
            shutil.rmtree(self.folder, ignore_errors=True)
            with contextlib.suppress(OSError):  # other processes of this host have folders there
                Path(self.folder.parent).rmdir()
        if self._manager is not None:
            self._manager.close()

    def save(self, step: int, state: Tree) -> None:
        """Starts to save; the state may be donated at once.  A failure ends all saving.

        The previous state is kept until all processes have saved this one.
        """
        self._wait()
        gather(None)
        if not self._is_enabled:
            return
        item = integrity.Save(nested(state))
        item.run = {"start": self._starts[0], "placement": self._placement}
        try:
            self._keep(max(self._listed(), default=None))
            self.folder.mkdir(parents=True, exist_ok=True)  # another program may have removed it
            self._manager = self._manager or self._open()
            self._manager.save(step, args=ocp.args.Composite(**{ITEM: item}), force=True)
        except Exception as error:
            self._failed(error)

    def restore(self, newer_than: int | None) -> tuple[Tree, int] | None:
        """Restores the newest state for which the processes together have all shards, or None.

        All processes call it.  It removes older states, and states of other runs or layouts.
        The settings of a run without any checkpoint may change: then there is nothing to restore.
        """
        saved_here = [] if newer_than is None else self._undamaged_steps(newer_than)
        for step in sorted(set[int]().union(*gather(saved_here)), reverse=True):
            arrays = self._read(step) if step in saved_here else None
            saved_by = gather(arrays is not None)
            abstract, structure = jax.tree.flatten(self._state)
            is_saved = np.vectorize(lambda device, of=saved_by: of[device.process_index])
            whole = completed(abstract, arrays, is_saved(self._mesh.devices), self._mesh)
            if whole is not None:
                self._keep(step)
                return jax.tree.unflatten(structure, whole), step
            lost = join_names(index for index, is_saved in enumerate(saved_by) if not is_saved)
            logger.warning("Local checkpoint %d is not used: shards of %s are lost.", step, lost)
        self._keep(None)
        return None

    def _undamaged_steps(self, newer_than: int) -> list[int]:
        """Returns the newer, undamaged steps that this process saved in this run and layout."""
        steps = list[int]()
        for step in self._listed():
            try:
                integrity.verify(self._path(step))
                run = integrity.read_manifest(self._path(step)).run or {}
                is_of_run = run.get("start") in self._starts
                if step > newer_than and is_of_run and run.get("placement") == self._placement:
                    steps.append(step)
            except DamagedCheckpoint as reason:
                logger.warning("Local checkpoint %d is damaged: %s", step, reason)
        return steps

    def _read(self, step: int) -> list[jax.Array] | None:
        """Reads the shards of this process; returns None if they are damaged."""
        item = nested(self._state)
        args = ocp.args.PyTreeRestore(item, ocp.checkpoint_utils.construct_restore_args(item))
        try:
            tree = integrity.read(lambda: self._handler.restore(self._path(step), args=args))
        except DamagedCheckpoint as reason:
            logger.warning("Local checkpoint %d is damaged: %s", step, reason)
            return None
        arrays = traverse_util.flatten_dict(tree, sep="/")
        return [arrays[path] for path in by_path(self._state)]

    def _path(self, step: int) -> epath.Path:
        return self.folder / str(step) / ITEM

    def _listed(self) -> list[int]:
        return [int(path.name) for path in self.folder.glob("*") if path.name.isdecimal()]

    def _keep(self, step: int | None) -> None:
        for other in self._listed():
            if other != step:
                (self.folder / str(other)).rmtree(missing_ok=True)

    def _open(self) -> ocp.CheckpointManager:
        options = ocp.CheckpointManagerOptions(
            create=False, cleanup_tmp_directories=True, save_root_metadata=False,
            multiprocessing_options=self._processes,
            # Otherwise, a process may wait for a signal that another one has deleted.
            async_options=ocp.AsyncOptions(create_directories_asynchronously=False),
        )  # fmt: skip
        handlers = {ITEM: self._handler}
        return ocp.CheckpointManager(self.folder, options=options, item_handlers=handlers)

    def _wait(self) -> None:
        if self._manager is not None:
            try:
                self._manager.wait_until_finished()
            except Exception as error:
                self._failed(error)

    def _failed(self, error: Exception) -> None:
        self._manager, self._is_enabled = None, False  # other saves would fail as well
        what = f"The local checkpoint in {self.folder} failed: {failure(self.folder, error)}."
        logger.warning(f"{what}  The run continues without them.")


def unchanged_starts(history: Sequence[Start]) -> list[str]:
    """Returns the times of the last starts, newest first, each of which continued the one before.

    A start that changed a setting, went back, or began another run ends the list.
    """
    newest_first = [*reversed(history)]
    times = [start.time for start in newest_first[:1]]
    for start, before in itertools.pairwise(newest_first):
        went_back = start.step < (before.saved or 0)
        if start.changes or went_back or start.is_of_other_run(before):
            break
        times.append(before.time)
    return times


def placement(state: Tree, mesh: Mesh) -> str:
    """Returns a checksum of the arrays' shapes, types and shardings, and of the mesh's devices."""
    arrays = [(p, x.shape, str(x.dtype), str(x.sharding.spec)) for p, x in by_path(state).items()]
    devices = [(device.id, device.process_index) for device in mesh.devices.flat]
    return f"{zlib.crc32(repr((mesh.shape_tuple, devices, arrays)).encode()):08x}"


def completed(
    abstract: Sequence[jax.ShapeDtypeStruct],
    arrays: Sequence[jax.Array] | None,
    is_saved: np.ndarray,
    mesh: Mesh,
) -> list[jax.Array] | None:
    """Returns arrays whose lost shards are copied from replicas; None if some have no replica.

    `is_saved` marks the devices of the mesh that still have their shards.
    """
    names = mesh.axis_names
    axes = tuple(tuple(sorted(free_axes(x.sharding.spec, names))) for x in abstract)
    if not all(is_saved.any(tuple(map(names.index, free))).all() for free in set(axes)):
        return None
    if arrays is None:
        arrays = [_zeros(x) for x in abstract]
    if is_saved.all():
        return [*arrays]
    specs = [x.sharding.spec for x in abstract]
    fill = jax.shard_map(
        lambda shards: [_maximum(*pair) for pair in zip(shards, axes, strict=True)],
        mesh=mesh, in_specs=(specs,), out_specs=specs, check_vma=False,
    )  # fmt: skip
    return jax.jit(fill, donate_argnums=0)([*arrays])


def _zeros(x: jax.ShapeDtypeStruct) -> jax.Array:
    shard = np.zeros(x.sharding.shard_shape(x.shape), x.dtype)
    return jax.make_array_from_callback(x.shape, x.sharding, lambda _: shard)


def _maximum(shard: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Returns the bits of the devices that have the shard; other devices have zeros."""
    bits = lax.bitcast_convert_type(shard, f"uint{8 * shard.dtype.itemsize}")
    return lax.bitcast_convert_type(lax.pmax(bits, axes), shard.dtype) if axes else shard
