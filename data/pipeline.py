"""Packs chunks on the workers of an Apache Beam pipeline, and returns their rows in order.

The text of a chunk and its rows are files of a folder that the workers share.  Their names are
hashes of the text and of how it is packed, so that the next pipeline packs only what a killed one
left.
"""

import dataclasses
import functools
import hashlib
import io
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from configs.errors import UserError, brief, extra_required
from configs.paths import absolute, is_remote, path_of
from data import vocab
from data.build import PackedChunk, Packing
from data.packing.rows import Counts
from data.sources.pairs import Pair
from data.storage.files import Unfinished, atomic_write
from data.workers import Job

logger = logging.getLogger(__name__)

_AGAIN = "The same command goes on with the chunks that are not packed."


@dataclasses.dataclass(frozen=True)
class BeamPipeline:
    """Describes a pipeline: the name of its runner, and the runner's flags."""

    runner: str
    flags: tuple[str, ...] = ()

    def check(self) -> None:
        """Raises where Beam, the runner or one of its flags is missing."""
        self._new()

    def in_order(
        self, jobs: Iterator[Job], packing: Packing, folder: Path
    ) -> Iterator[PackedChunk]:
        """Yields the rows of chunks in their order.

        The caller removes the folder when it has all of them.
        """
        folder = absolute(folder)  # workers have other working directories
        if not is_remote(folder):
            folder.mkdir(parents=True, exist_ok=True)
        names = []
        for job in jobs:  # of (examples, tag, training); a chunk is written unless it is there
            text = json.dumps(job, ensure_ascii=False).encode()
            names.append(hashlib.sha256(packing.key.encode() + text).hexdigest()[:32])
            if not (folder / names[-1]).exists():
                atomic_write(folder / names[-1], text)
        missing = [n for n in dict.fromkeys(names) if not _rows_file(folder, n).exists()]
        if len(missing) == 1:  # sooner done than a pipeline has started
            _Worker(packing, str(folder)).pack(missing[0])
        elif missing:
            logger.info("%s packs %d chunks of text in %s", self.runner, len(missing), folder)
            self._run(missing, _Worker(packing, str(folder)))
        for path in (_rows_file(folder, name) for name in names):
            try:
                arrays = dict(np.load(io.BytesIO(path.read_bytes())))
            except FileNotFoundError:
                raise Unfinished(f"{path}: no worker wrote it.  {_AGAIN}") from None
            if "error" in arrays:
                path.unlink()  # the next command tries again
                raise UserError(str(arrays["error"]))
            counts = Counts.read(json.loads(str(arrays.pop("counts"))))
            yield arrays, counts

    def _run(self, names: Sequence[str], worker: "_Worker") -> None:
        pipeline = self._new()
        import apache_beam as beam

        chunks = pipeline | "Name chunks" >> beam.Create(names)
        # Or a runner may give all of them to one worker.
        spread = chunks | "Spread chunks" >> beam.Reshuffle()
        _ = spread | "Pack chunks" >> beam.Map(worker.pack_alone)
        try:
            run = pipeline.run()
            run.wait_until_finish()
        except Exception as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise Unfinished(f"{self.runner} failed: {brief(lines[-1], 400)}  {_AGAIN}") from error
        if run.state != "DONE":
            raise Unfinished(f"{self.runner} ended as {run.state}.  {_AGAIN}")

    def _new(self) -> Any:
        """Returns an empty pipeline."""
        with extra_required("beam", "--beam"):
            import apache_beam as beam
        from apache_beam.options.pipeline_options import PipelineOptions

        try:
            return beam.Pipeline(options=PipelineOptions(list(self.flags), runner=self.runner))
        except (ValueError, ImportError) as error:
            raise UserError(f"--runner={self.runner}: {brief(str(error), 600)}") from None


@dataclasses.dataclass(frozen=True)
class _Worker:
    """Packs the chunks of a folder; Beam sends it to the machines that do so."""

    packing: Packing
    folder: str

    def pack_alone(self, name: str) -> None:
        """Packs a chunk on one core, as a machine has other workers for the other cores."""
        vocab.limit_threads(1)
        self.pack(name)

    def pack(self, name: str) -> None:
        """Packs a chunk and writes its rows, or what is wrong with its text."""
        folder = path_of(self.folder)
        try:
            text = (folder / name).read_bytes()
        except FileNotFoundError:
            raise Unfinished(
                f"{folder}: a worker does not have this folder.  --data_dir must be a folder that "
                "all workers share, or gs://bucket/name."
            ) from None
        written: dict[str, Any]  # as savez takes them
        try:
            examples, *of_chunk = json.loads(text)
            pairs_or_texts = [x if isinstance(x, str) else Pair(*x) for x in examples]
            arrays, counts = self._pack_chunk(pairs_or_texts, *of_chunk)
            written = {**arrays, "counts": np.array(json.dumps(counts.written()))}
        except UserError as error:
            written = {"error": np.array(str(error))}
        file = io.BytesIO()
        np.savez(file, **written)
        atomic_write(_rows_file(folder, name), file.getvalue())

    @functools.cached_property
    def _pack_chunk(self) -> Callable[..., PackedChunk]:
        return self.packing()


def _rows_file(folder: Path, name: str) -> Path:
    return folder / f"{name}.npz"
