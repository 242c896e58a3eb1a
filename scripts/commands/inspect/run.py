"""Runs `meshloom inspect checkpoint`: shows the arrays of a run."""

import dataclasses

from configs.errors import UserError
from scripts.commands.common import write_json
from scripts.commands.inspect.flags import InspectCheckpointFlags
from scripts.commands.trained import single_checkpoint
from scripts.devices import start_devices
from scripts.terminal import print_table
from trainer.checkpoints.manager import Checkpoints
from trainer.model_dir import ModelDir
from trainer.resume.history import starts


def checkpoint(flags: InspectCheckpointFlags) -> None:
    """Prints every array of a checkpoint, and the changes of the run until then."""
    start_devices()
    ModelDir(flags.model_dir).check_config()
    with Checkpoints(flags.model_dir) as checkpoints:
        if not (steps := checkpoints.steps()):
            raise UserError(f"{flags.model_dir}: no checkpoint there.")
        step = single_checkpoint(checkpoints, flags.checkpoint)
        step = steps[-1] if step is None else step
        arrays = checkpoints.describe(step)
    rows = [
        (path, "x".join(map(str, a.shape)), str(a.dtype), a.size * a.dtype.itemsize)
        for path, a in arrays.items()
    ]
    names = ("path", "shape", "dtype", "bytes")
    history = starts(flags.model_dir)
    for start in history:
        for change in start.changes if start.step <= step else ():
            print(f"after step {start.step}: {change['name']} = {change['new']}, "
                  f"it was {change['old']} ({start.time})")  # fmt: skip
    print_table(["path", "shape", "type", "bytes"], rows)
    print(f"step {step} of {steps}; {sum(row[3] for row in rows):,} bytes")
    result = {
        "step": step,
        "steps": steps,
        "history": [dataclasses.asdict(start) for start in history],
        "arrays": [dict(zip(names, row, strict=True)) for row in rows],
    }
    write_json(flags.json_file, result)
    ModelDir(flags.model_dir).check_records()
