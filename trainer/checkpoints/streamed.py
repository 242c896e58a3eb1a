"""Saves arrays slice by slice, so that a checkpoint needs no more memory than its largest slice."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from orbax.checkpoint._src.serialization import ocdbt_utils, tensorstore_utils


@dataclasses.dataclass(frozen=True, eq=False)
class StreamedArray:
    """Describes an array whose slices along the first axis are read one at a time, as it is saved.

    Each slice is a chunk of the checkpoint.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    read: Callable[[slice], np.ndarray]
    rows: int
    """Places of the first axis in a slice."""

    @property
    def slices(self) -> list[slice]:
        starts = range(0, self.shape[0], self.rows)
        return [slice(start, min(start + self.rows, self.shape[0])) for start in starts]


class StreamedHandler(ocp.type_handlers.NumpyHandler):
    """Saves streamed arrays as Orbax saves those of JAX, one after another."""

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
        for value, info in zip(values, infos, strict=True):
            await info.await_path_creation()
            if jax.process_index() == 0:
                await write(value, info)


async def write(value: StreamedArray, info: ocp.type_handlers.ParamInfo) -> None:
    """Writes the slices of an array, each once the one before is on disk."""
    uses_ocdbt = bool(info.is_ocdbt_checkpoint)
    spec = tensorstore_utils.build_array_write_spec(
        info,
        global_shape=value.shape,
        local_shape=(value.rows, *value.shape[1:]),
        dtype=value.dtype,
        use_ocdbt=uses_ocdbt,
        process_index=ocdbt_utils.get_process_index_for_subdir(use_ocdbt=uses_ocdbt),
    )
    array = await ts.open(ts.Spec(spec.json), create=True, open=True, context=info.ts_context)
    for place in value.slices:
        await array[place].write(value.read(place))
