"""Distinguishes complete checkpoints from damaged ones.

A manifest, which is written last, lists the files, with checksums of the small ones.  Large files
hold the chunks of arrays.  Each chunk has its own checksum, which every read verifies.
"""

import asyncio
import contextlib
import dataclasses
import functools
import json
import sys
import zlib
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Annotated, Any, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from etils import epath
from orbax.checkpoint._src import asyncio_utils
from orbax.checkpoint._src.serialization import ocdbt_utils, tensorstore_utils
from pydantic import ConfigDict, Field, FiniteFloat, NonNegativeInt
from pydantic.dataclasses import dataclass

from configs.errors import RunError, one_line
from configs.json_reader import sign, verified
from data.storage import lookup, remote
from data.storage.files import sync_below
from trainer.metrics.jsonl import Line
from trainer.multihost import gather
from trainer.resume.history import MANIFEST

T = TypeVar("T")
CHECKSUM_UP_TO_BYTES = 1 << 24
"""Larger files hold only arrays.  `verify` compares just their sizes, which is cheap."""
WRITES_S = 30.0
"""How long a failed save waits for its other writes."""


class DamagedCheckpoint(Exception):
    """Reports why a checkpoint is damaged."""


class ListingHandler(ocp.PyTreeCheckpointHandler):
    """Saves like Orbax, and adds a list of the checkpoint's files.

    Orbax renames the folder after `finalize`, so every finished checkpoint has the list.
    """

    async def async_save(self, directory: Any, args: Any) -> Any:
        # Holds no arrays: they would stay in memory until the next save.
        names = ("metric", "higher_is_better", "run", "step")
        self._listed = functools.partial(Manifest, **{n: getattr(args, n) for n in names})
        return await super().async_save(directory, args=args)

    def finalize(self, directory: epath.Path) -> None:
        super().finalize(directory)
        names = [name for name, _ in lookup.sizes_below(directory)]
        manifest = self._listed(files={name: fingerprint(directory / name) for name in names})
        (directory / MANIFEST).write_text(manifest.dump())
        sync_below(directory)


@functools.cache
def checksum_chunks() -> None:
    """Makes zstd write its checksum (of XXH64) after each chunk of an array.

    Decompressing a chunk then verifies the checksum at almost no cost.  A CRC-32C of the compressed
    chunk would need another pass.  Orbax has no setting for the codecs of zarr3.
    """
    build = tensorstore_utils._build_zarr3_metadata

    @functools.wraps(build)
    def build_with_checksums(*args: Any, **kwargs: Any) -> dict[str, Any]:
        metadata: dict[str, Any] = build(*args, **kwargs)
        (shards,) = metadata["codecs"]
        _bytes, zstd = shards["configuration"]["codecs"]
        zstd["configuration"]["checksum"] = True
        return metadata

    tensorstore_utils._build_zarr3_metadata = build_with_checksums


@functools.cache
def wait_for_writes() -> None:
    """Makes a failed save wait for its other writes before Orbax closes the event loop.

    Otherwise, TensorStore prints a traceback for each write that ends later.
    """
    run = asyncio_utils._run_sync_via_new_loop

    async def settled(work: Coroutine[Any, Any, T]) -> T:
        try:
            return await work
        except BaseException:
            if others := asyncio.all_tasks() - {asyncio.current_task()}:
                await asyncio.wait(others, timeout=WRITES_S)
            raise

    asyncio_utils._run_sync_via_new_loop = lambda work: run(settled(work))


@ocp.args.register_with_handler(ListingHandler, for_save=True, for_restore=True)
@dataclasses.dataclass
class Save(ocp.args.PyTreeSave):
    """Holds what to save, its step, its metric and the metric's direction, and the run's record."""

    metric: float | None = None
    higher_is_better: bool = False
    run: Line | None = None
    step: int | None = None


def fingerprint(file: epath.Path) -> list[int]:
    """Returns a file's size, and its checksum unless it is large."""
    size = file.stat().length
    return [size] if size > CHECKSUM_UP_TO_BYTES else [size, zlib.crc32(file.read_bytes())]


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Manifest:
    """Lists a checkpoint's files with their fingerprints, and holds its metric and its run."""

    metric: FiniteFloat | None
    higher_is_better: bool
    files: dict[str, Annotated[list[NonNegativeInt], Field(min_length=1, max_length=2)]]
    run: dict[str, Any] | None = None
    """The signed record of the run; older versions wrote none."""
    step: NonNegativeInt | None = None
    """The step that was saved, which names its folder; older versions wrote none."""

    def dump(self) -> str:
        """Returns signed JSON."""
        return json.dumps(sign(dataclasses.asdict(self)))

    @classmethod
    def parse(cls, text: str) -> "Manifest":
        """Parses the output of `dump`; raises ValueError or TypeError for any other text."""
        return cls(**verified(dict(json.loads(text))))


def read_manifest(folder: epath.Path) -> Manifest:
    """Reads the manifest of a checkpoint."""
    with reading(folder, MANIFEST):
        return Manifest.parse((folder / MANIFEST).read_text())


@contextlib.contextmanager
def reading(folder: epath.Path, name: str) -> Iterator[None]:
    """Reports a file that cannot be read as damage, unless remote storage does not answer."""
    try:
        yield
    except Exception as error:
        if problem := remote.failure(error):
            raise RunError(f"{folder}: {problem}") from error
        # Also from a null byte in the name, or from a manifest with other contents.
        if isinstance(error, OSError | ValueError | TypeError | RecursionError):
            raise DamagedCheckpoint(f"{name} is missing or unreadable") from error
        raise


def verify(folder: epath.Path, step: int | None = None) -> None:
    """Raises `DamagedCheckpoint` unless every file is unchanged since it was saved for this step.

    Compares only the sizes of large files; reading their arrays verifies the contents.
    """
    manifest = read_manifest(folder)
    if manifest.step not in (None, step):
        raise DamagedCheckpoint(f"it is step {manifest.step}: rename its folder to {manifest.step}")
    for name, saved in manifest.files.items():
        with reading(folder, name):
            present = fingerprint(folder / name)
        if present[0] != saved[0]:
            raise DamagedCheckpoint(f"{name} has {present[0]:,} of {saved[0]:,} bytes")
        if present != saved:
            raise DamagedCheckpoint(f"{name} is not what was saved")


def read(call: Callable[[], T]) -> T:
    """Returns the result of a call that reads, and reports errors in the data as damage."""
    try:
        return call()
    except (MemoryError, TypeError, jax.errors.JaxRuntimeError):
        raise
    except Exception as error:  # Orbax raises a bare Exception for a truncated array
        _hide_abandoned_reads()
        cause: BaseException = error
        while cause.__cause__ is not None:  # Orbax's message has all of TensorStore's settings
            cause = cause.__cause__
        if problem := remote.failure(cause):
            raise RunError(problem) from error
        raise DamagedCheckpoint(one_line(cause)) from error


def on_all_processes(call: Callable[[], T]) -> T:
    """Returns the result of a call that reads; damage in one process is damage in all."""
    damage = None
    try:
        result = call()
    except DamagedCheckpoint as reason:
        damage = reason
    is_damaged = gather(damage is not None)
    if any(is_damaged) and damage is None:
        damage = DamagedCheckpoint(f"process {is_damaged.index(True)} cannot read it")
    if damage is not None:
        raise damage
    return result


@functools.cache
def _hide_abandoned_reads() -> None:
    """Keeps Python from printing a page for each read that Orbax abandons after a failed one."""
    show = sys.unraisablehook

    def show_others(unraisable: "sys.UnraisableHookArgs") -> None:
        is_read = "_read_array_index_and_device_put" in repr(unraisable.object)
        if not is_read and str(unraisable.exc_value) != "Event loop is closed":
            show(unraisable)

    sys.unraisablehook = show_others


@dataclasses.dataclass(frozen=True, eq=False)
class StreamedArray:
    """Describes an array whose slices along the first axis are read one at a time during the save.

    Each slice is a chunk of the checkpoint.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    read: Callable[[slice], np.ndarray]
    rows: int
    """Size of a slice along the first axis."""

    @property
    def slices(self) -> list[slice]:
        starts = range(0, self.shape[0], self.rows)
        return [slice(start, min(start + self.rows, self.shape[0])) for start in starts]


class StreamedHandler(ocp.type_handlers.NumpyHandler):
    """Saves streamed arrays one at a time, in Orbax's format for JAX arrays."""

    def typestr(self) -> str:
        return "jax.Array"

    async def serialize(
        self,
        values: Sequence[StreamedArray],
        infos: Sequence[ocp.type_handlers.ParamInfo],
        args: Sequence[ocp.SaveArgs] | None = None,
    ) -> Sequence[ocp.future.Future]:
        work = self._write(values, infos)
        return [ocp.future.CommitFutureAwaitingContractedSignals(work, name="streamed_arrays")]

    async def _write(
        self, values: Sequence[StreamedArray], infos: Sequence[ocp.type_handlers.ParamInfo]
    ) -> None:
        """Writes arrays in the first process, each slice after the previous one is on disk."""
        for value, info in zip(values, infos, strict=True):
            await info.await_path_creation()
            if jax.process_index() > 0:
                continue
            uses_ocdbt = bool(info.is_ocdbt_checkpoint)
            spec = tensorstore_utils.build_array_write_spec(
                info,
                global_shape=value.shape,
                local_shape=(value.rows, *value.shape[1:]),
                dtype=value.dtype,
                use_ocdbt=uses_ocdbt,
                process_index=ocdbt_utils.get_process_index_for_subdir(use_ocdbt=uses_ocdbt),
            )
            described = ts.Spec(spec.json)
            array = await ts.open(described, create=True, open=True, context=info.ts_context)
            for place in value.slices:
                await array[place].write(value.read(place))
