"""What `meshloom inspect` shows."""

from pathlib import Path
from typing import Any

import jax
import numpy as np

from configs.errors import UserError
from configs.load import Config
from configs.read import Reference
from configs.spec import SPECS
from data.cache import Prepared, prepare
from data.order import rows_of_step
from data.packing.rows import Rows
from layouts.axes import BY_LETTER
from layouts.layout import Layout
from layouts.lint.recorder import record
from layouts.lint.report import lint, report, table
from layouts.mesh import mesh_sizes
from models.api import ModelSpec
from models.transformer import Transformer
from scripts.commands.common import Strings, only, set_where, settings, task_of, write_json
from scripts.terminal import print_table
from trainer.checkpoints.manager import Checkpoints
from trainer.checkpoints.restore import chosen_steps
from trainer.checks import layout_name, record_loss, sources
from trainer.run import Run


def config(
    gin_file: Strings, gin_param: Strings, json_file: str | None, model_dir: Path | None
) -> None:
    """Every setting: what it is and which file set it."""
    found = settings(model_dir, gin_file, gin_param).table(Run, Layout)
    print_table(["name", "value", "set in"], [(r.name, repr(r.value), r.where) for r in found])
    write_json(json_file, [{"name": r.name, "value": r.value, "where": r.where} for r in found])


def data(
    data_dir: Path,
    gin_file: Strings,
    gin_param: Strings,
    json_file: str | None,
    model_dir: Path | None,
    split: str,
    rows: str,
    step: int | None,
) -> None:
    """Packed rows, decoded."""
    found = settings(model_dir, gin_file, gin_param)
    prepared = prepare(task_of(found), data_dir)
    if split not in prepared.splits:
        raise UserError(f"--split={split}: not there.  Legal: {', '.join(prepared.splits)}.")
    held = prepared.splits[split]
    if step is not None:
        run = found.make(Run)
        ids = rows_of_step(held, run.seed, step - 1, run.batch_sequences).tolist()
    else:
        ids = _numbers(rows, len(held))
    segments = [segment for row in ids for segment in _segments(prepared, held, row)]
    shown = ["row", "segment", *([] if prepared.source_vocab is None else ["source"]), "tokens"]
    shown.append("text")
    print_table(shown, [[segment[name] for name in shown] for segment in segments])
    write_json(json_file, segments)


def _numbers(text: str, count: int) -> list[int]:
    try:
        ids = [int(part) for part in text.split(",")]
    except ValueError:
        raise UserError(f"--rows={text}: legal are numbers with commas, as in 0,7,12.") from None
    if not all(0 <= number < count for number in ids):
        raise UserError(f"--rows={text}: the split has rows 0 to {count - 1}.")
    return ids


def _segments(prepared: Prepared, rows: Rows, row: int) -> list[dict[str, Any]]:
    batch = rows.batch(np.array([row]))
    found = []
    for segment in range(1, int(batch["segments_BL"].max()) + 1):
        ids = batch["targets_BL"][batch["segments_BL"] == segment]
        line: dict[str, Any] = {"row": row, "segment": segment}
        if prepared.source_vocab is not None:
            sources = batch["inputs_BM"][batch["segments_BM"] == segment]
            line["source"] = prepared.source_vocab.decode(sources)
            line["source_tokens"] = len(sources)
            line["source_pieces"] = " ".join(prepared.source_vocab.pieces(sources))
        line["tokens"] = len(ids)
        line["text"] = prepared.vocab.decode(ids)
        line["pieces"] = " ".join(prepared.vocab.pieces(ids))
        found.append(line)
    return found


def params(
    gin_file: Strings, gin_param: Strings, json_file: str | None, model_dir: Path | None
) -> None:
    """Every weight of the model."""
    found = settings(model_dir, gin_file, gin_param)
    spec, layout = model_of(found), found.make(Layout)
    weights = record(lambda whole: spec.model(whole).init(jax.random.key(0))).weights
    sizes = planned_sizes(layout)
    rows = table(weights, layout, sizes)
    total = sum(int(np.prod(row.shape)) for row in rows)
    per_device = sum(row.bytes_per_device for row in rows)
    print_table(
        ["path", "axes", "shape", "place", "weights", "bytes a device"],
        [
            (r.path, r.axes, "x".join(map(str, r.shape)), placed(r.axes, r.place),
             int(np.prod(r.shape)), r.bytes_per_device)
            for r in rows
        ],
    )  # fmt: skip
    print(f"{total:,} parameters, {per_device:,} bytes on each device of mesh {layout.mesh}")
    write_json(
        json_file,
        {
            "parameters": total,
            "bytes": sum(row.bytes for row in rows),
            "bytes_per_device": per_device,
            "weights": [{**row._asdict(), "place": placed(row.axes, row.place)} for row in rows],
        },
    )


def checkpoint(model_dir: Path, checkpoint: str, json_file: str | None) -> None:
    """Every array of a checkpoint."""
    with Checkpoints(model_dir) as checkpoints:
        steps = checkpoints.steps()
        if not steps:
            raise UserError(f"{model_dir}: no checkpoint there.")
        step = only(chosen_steps(checkpoints, checkpoint)) or steps[-1]
        arrays = checkpoints.describe(step)
    rows = [
        (path, "x".join(map(str, a.shape)), str(a.dtype), a.bytes) for path, a in arrays.items()
    ]
    print_table(["path", "shape", "type", "bytes"], rows)
    print(f"step {step} of {steps}; {sum(row[3] for row in rows):,} bytes")
    write_json(
        json_file,
        {
            "step": step,
            "steps": steps,
            "arrays": [
                dict(zip(("path", "shape", "dtype", "bytes"), row, strict=True)) for row in rows
            ],
        },
    )


def layout(
    gin_file: Strings, gin_param: Strings, json_file: str | None, model_dir: Path | None
) -> None:
    """Problems of the layout, and where each kind of tensor of the model lives."""
    found = settings(model_dir, gin_file, gin_param)
    run, layout = found.make(Run), found.make(Layout)
    sizes = planned_sizes(layout)
    seen = record_loss(run)
    problems = lint(layout, sizes, seen, sources(set_where(found)))
    kinds = sorted({(t.axes, t.stored) for t in seen.tensors})
    places = [
        (
            axes,
            "weight" if stored else "activation",
            placed(axes, layout.place(axes, stored=stored)),
        )
        for axes, stored in kinds
    ]
    print_table(["axes", "kind", "place"], places)
    print(report(layout_name(set_where(found)), problems))
    write_json(
        json_file,
        {
            "mesh": sizes,
            "problems": [str(problem) for problem in problems],
            "places": [dict(zip(("axes", "kind", "place"), row, strict=True)) for row in places],
        },
    )


def model_of(config: Config) -> ModelSpec:
    """The model that the settings name; a run's other settings may be missing."""
    bound = {binding.name: binding.value for binding in config.bindings()}
    reference = bound.get("Run.model")
    kind = SPECS[reference.target] if isinstance(reference, Reference) else Transformer
    model = config.make(kind)
    assert isinstance(model, ModelSpec)
    return model


def planned_sizes(layout: Layout) -> dict[str, int]:
    """Mesh sizes as written, whatever devices there are; -1 stands for what this machine has."""
    return mesh_sizes(layout.mesh, len(jax.devices()) if "-1" in layout.mesh else None)


def placed(axes: str, place: jax.P) -> str:
    """A placement in the words of a layout file.

    >>> placed("NDF", jax.P(None, "data", "model"))
    'd_model:data;d_ff:model'
    """
    pairs = []
    for letter, mesh_axes in zip(axes, place, strict=True):
        for mesh_axis in (mesh_axes,) if isinstance(mesh_axes, str) else mesh_axes or ():
            pairs.append(f"{BY_LETTER[letter.upper()].name}:{mesh_axis}")
    return ";".join(pairs) or "whole"
