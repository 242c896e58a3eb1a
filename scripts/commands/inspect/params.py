"""Runs `meshloom inspect params`: shows the weights of a model."""

from collections.abc import Iterable

import jax
import numpy as np

from configs.load import Config
from configs.read import Reference
from data.tokenizers.sentence_piece import SentencePiece
from data.vocabs import SOURCE_FILE, TARGET_FILE
from layouts.layout import Layout
from layouts.lint.recorder import record
from layouts.lint.report import table
from layouts.mesh import mesh_sizes
from models.api import ModelSpec
from models.transformer import Transformer
from scripts.commands.common import settings_of, write_json
from scripts.commands.inspect.flags import InspectParamsFlags
from scripts.terminal import print_table
from trainer.run import with_vocab_rows


def params(flags: InspectParamsFlags) -> None:
    """Prints every weight of the model."""
    config = settings_of(flags.settings)
    spec, layout = model_of(config), config.make(Layout)
    init = record(lambda whole: spec.model(whole).init(jax.random.key(0)), spec.declared_axes)
    rows = table(init.weights, layout, planned_sizes(layout))
    total = sum(int(np.prod(row.shape)) for row in rows)
    per_device = sum(row.bytes_per_device for row in rows)
    print_table(
        ["path", "axes", "shape", "place", "weights", "bytes per device"],
        [
            (r.path, r.axes, "x".join(map(str, r.shape)), sharding_text(r.axis_names, r.place),
             int(np.prod(r.shape)), r.bytes_per_device)
            for r in rows
        ],
    )  # fmt: skip
    if init.declared_axes:
        axes = ", ".join(f"{axis.letter} {axis.name}" for axis in init.declared_axes)
        print(f"Axes of parts: {axes}")
    print(f"{total:,} parameters, {per_device:,} bytes on each device of mesh {layout.mesh}")
    write_json(
        flags.json_file,
        {
            "parameters": total,
            "bytes": sum(row.bytes for row in rows),
            "bytes_per_device": per_device,
            "weights": [
                {**row._asdict(), "place": sharding_text(row.axis_names, row.place)} for row in rows
            ],
        },
    )


def model_of(config: Config) -> ModelSpec:
    """Returns the model that the settings name; a run's other settings may be missing."""
    model = config.value("Run.model")
    if not isinstance(model, ModelSpec):
        model = config.make(Transformer)
    task = config.bound["Run.task"].value if "Run.task" in config.bound else None
    kind, scopes = (task.target, task.scopes) if isinstance(task, Reference) else ("Task", ())
    tokenizers = {
        TARGET_FILE: config.value(f"{kind}.vocab", scopes) or config.make(SentencePiece),
        SOURCE_FILE: config.value(f"{kind}.source_vocab", scopes),
    }
    return with_vocab_rows(model, tokenizers)


def planned_sizes(layout: Layout) -> dict[str, int]:
    """Returns mesh sizes as written, whatever devices there are; -1 is what this machine has."""
    return mesh_sizes(layout.mesh, len(jax.devices()) if "-1" in layout.mesh else None)


def sharding_text(names: Iterable[str], place: jax.P) -> str:
    """Writes how axes are split in the words of a layout file.

    >>> sharding_text(("layers", "d_model", "d_ff"), jax.P(None, "data", "model"))
    'd_model:data;d_ff:model'
    """
    pairs = []
    for name, mesh_axes in zip(names, place, strict=True):
        for mesh_axis in (mesh_axes,) if isinstance(mesh_axes, str) else mesh_axes or ():
            pairs.append(f"{name}:{mesh_axis}")
    return ";".join(pairs) or "whole"
