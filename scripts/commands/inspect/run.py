"""Runs `meshloom inspect data` and `checkpoint`: shows packed rows, and the arrays of a run."""

import dataclasses
from typing import Any

import numpy as np

from configs.errors import UserError
from data.cache import Prepared
from data.order import rows_of_step
from data.packing.rows import Rows, read_rows
from scripts.commands.common import data_dir_of, settings_of, task_of, write_json
from scripts.commands.inspect.flags import InspectCheckpointFlags, InspectDataFlags
from scripts.commands.trained import single_checkpoint
from scripts.devices import start_devices
from scripts.terminal import print_table
from trainer.checkpoints.manager import Checkpoints
from trainer.model_dir import ModelDir
from trainer.prepare import prepare
from trainer.resume.history import starts
from trainer.run import Run


def checkpoint(flags: InspectCheckpointFlags) -> None:
    """Prints every array of a checkpoint, and what changed in the run until then."""
    start_devices()
    with Checkpoints(flags.model_dir) as checkpoints:
        steps = checkpoints.steps()
        if not steps:
            raise UserError(f"{flags.model_dir}: no checkpoint there.")
        step = single_checkpoint(checkpoints, flags.checkpoint) or steps[-1]
        arrays = checkpoints.describe(step)
    rows = [
        (path, "x".join(map(str, a.shape)), str(a.dtype), a.bytes) for path, a in arrays.items()
    ]
    history = starts(flags.model_dir)
    for start in history:
        for change in start.changes if start.step <= step else ():
            print(f"after step {start.step}: {change['name']} = {change['new']}, "
                  f"it was {change['old']} ({start.time})")  # fmt: skip
    print_table(["path", "shape", "type", "bytes"], rows)
    print(f"step {step} of {steps}; {sum(row[3] for row in rows):,} bytes")
    write_json(
        flags.json_file,
        {
            "step": step,
            "steps": steps,
            "history": [dataclasses.asdict(start) for start in history],
            "arrays": [
                dict(zip(("path", "shape", "dtype", "bytes"), row, strict=True)) for row in rows
            ],
        },
    )


def data(flags: InspectDataFlags) -> None:
    """Prints packed rows, decoded."""
    config = settings_of(flags.settings)
    task, model_dir = task_of(config), flags.settings.model_dir
    vocabs, content_hash = None, None
    if model_dir is not None:
        directory = ModelDir(model_dir)
        vocabs, content_hash = directory.vocabs(task), directory.content_hash
    data_dir = data_dir_of(flags.data_dir, model_dir)
    prepared = prepare(task, data_dir, vocabs=vocabs, content_hash=content_hash)
    if flags.split not in prepared.splits:
        raise UserError(
            f"--split={flags.split}: no such split.  Legal: {', '.join(prepared.splits)}."
        )
    rows = prepared.splits[flags.split]
    if flags.step is not None:
        run = config.make(Run)
        ids = rows_of_step(rows, run.seed, flags.step - 1, run.batch_sequences).tolist()
    else:
        ids = list(flags.rows)
        if max(ids) >= len(rows):
            raise UserError(f"--rows: the split has rows 0 to {len(rows) - 1}, not {max(ids)}.")
    segments = [segment for row in ids for segment in _segments(prepared, rows, row)]
    shown = ["row", "segment", *([] if prepared.source_vocab is None else ["source"]), "tokens"]
    shown.append("text")
    print_table(shown, [[segment[name] for name in shown] for segment in segments])
    write_json(flags.json_file, segments)


def _segments(prepared: Prepared, rows: Rows, row: int) -> list[dict[str, Any]]:
    batch = rows.batch(np.array([row]))
    tokens_BL, segments_BL = read_rows(np.array([row]), rows.targets_BL, rows.segments_BL)
    segments = []
    for segment in range(1, int(segments_BL.max()) + 1):
        ids = tokens_BL[segments_BL == segment]
        line: dict[str, Any] = {"row": row, "segment": segment}
        if prepared.source_vocab is not None:
            sources = batch["inputs_BM"][batch["segments_BM"] == segment]
            line["source"] = prepared.source_vocab.decode(sources)
            line["source_tokens"] = len(sources)
            line["source_pieces"] = " ".join(prepared.source_vocab.pieces(sources))
        line["tokens"] = len(ids)
        line["text"] = prepared.vocab.text(ids)
        line["pieces"] = " ".join(prepared.vocab.pieces(ids))
        segments.append(line)
    return segments
