"""Runs `meshloom inspect params` and `layout`: shows weights, and how a layout places tensors."""

import linecache
from collections.abc import Iterable

import jax
import numpy as np

from configs.errors import UserError
from configs.imports import CHECKOUT
from configs.load import Config
from configs.read import Reference
from data.tokenizers.sentence_piece import SentencePiece
from data.vocabs import SOURCE_FILE, TARGET_FILE
from layouts.axes import Alphabet, axes_of_path
from layouts.layout import Layout
from layouts.lint.recorder import Record, Tensor, named_tensors, record
from layouts.lint.report import lint, report, table
from layouts.mesh import mesh_sizes
from layouts.padding import with_axes
from layouts.shards import mesh_axes
from models.api import ModelSpec
from models.transformer import Transformer
from scripts.commands.common import settings_of, write_json
from scripts.commands.inspect.flags import InspectLayoutFlags, InspectParamsFlags
from scripts.terminal import print_table
from scripts.texts import shortened
from trainer.checks import find_untraceable, layout_name, record_loss, with_size_origins
from trainer.run import Run, with_vocab_rows
from trainer.traces import trace_evaluate_step, trace_train_step

SHOWN = 4  # names of tensors in each kind; the JSON has all


def params(flags: InspectParamsFlags) -> None:
    """Prints every weight of the model."""
    config = settings_of(flags.settings)
    spec, layout = model_of(config), config.make(Layout)
    init = record(lambda whole: spec.model(whole).init(jax.random.key(0)), spec.declared_axes)
    rows = table(init.weights, layout, planned_sizes(layout, flags))
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
    result = {
        "parameters": total,
        "bytes": sum(row.bytes for row in rows),
        "bytes_per_device": per_device,
        "weights": [r._asdict() | {"place": sharding_text(r.axis_names, r.place)} for r in rows],
    }
    write_json(flags.json_file, result)


def model_of(config: Config) -> ModelSpec:
    """Returns the model that the settings name; other settings of a run may be missing."""
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


def planned_sizes(layout: Layout, flags: InspectParamsFlags) -> dict[str, int]:
    """Returns the mesh sizes as written, or for this machine's devices if -1 or simulated."""
    is_here = "-1" in layout.mesh or flags.devices.simulate_devices is not None
    return mesh_sizes(layout.mesh, len(jax.devices()) if is_here else None)


def sharding_text(names: Iterable[str], place: jax.P) -> str:
    """Writes how axes are sharded, in the syntax of a layout file."""
    split = zip(names, place, strict=True)
    pairs = [f"{name}:{mesh_axis}" for name, entry in split for mesh_axis in mesh_axes(entry)]
    return ";".join(pairs) or "whole"


def layout(flags: InspectLayoutFlags) -> None:
    """Prints the problems of the layout, and the placement of each kind of tensor in the model.

    Fails like `meshloom train` if one of the problems is an error.
    """
    config = settings_of(flags.settings)
    run, layout = config.make(Run), config.make(Layout)
    sizes, origins = planned_sizes(layout, flags), config.origins
    tensors = record_loss(run)
    problems = lint(layout, sizes, tensors, with_size_origins(run, origins))
    if all(problem.severity == "warning" for problem in problems):
        traces = trace_train_step, trace_evaluate_step
        untraceable = find_untraceable(run, layout, sizes, origins, *traces)
        problems = [*filter(None, [untraceable]), *problems]
    scoped, kinds = with_axes(layout, *tensors.declared_axes), []
    for (axes, stored), names in tensors_by_kind(tensors).items():
        axis_names = [tensors.axes.by_letter[a.upper()].name if a != "_" else a for a in axes]
        sharding = sharding_text(axis_names, scoped.place(axes, stored=stored))
        kinds.append((axes, "weight" if stored else "activation", sharding, names))
    columns = ("axes", "kind", "place", "tensors")
    print_table(columns, [(*kind, shortened(names, SHOWN)) for *kind, names in kinds])
    print()
    print_table(["letter", "axis", "meaning"], legend(tensors.axes, (axes for axes, *_ in kinds)))
    places = [dict(zip(columns, row, strict=True)) for row in kinds]
    result = {"mesh": sizes, "problems": [*map(str, problems)], "places": places}
    write_json(flags.json_file, result)
    text = report(layout_name(origins), problems)
    if any(problem.severity == "error" for problem in problems):
        raise UserError(text)
    print(text)


def tensors_by_kind(record: Record) -> dict[tuple[str, bool], list[str]]:
    """Returns the names of tensors by kind: axes, and whether the rules for stored weights apply.

    Weights are named by their paths, activations by their names in the model's code.  A kind
    without names lists the lines of code instead.  A slice of a stack, and a weight in another
    shape, have the name of the weight.
    """
    weights = {weight.path for weight in record.weights}
    of_a_layer = layers_by_axes(weight.path for weight in record.weights)
    kinds: dict[tuple[str, bool], dict[str, None]] = {}
    for tensor in sorted(record.tensors):
        names = kinds.setdefault((tensor.axes, tensor.stored), {})
        names.update(dict.fromkeys(names_of(tensor)))
    return {
        kind: [name for name in names if name in weights]
        or (of_a_layer.get(kind[0].replace("_", ""), []) if kind[1] else [])
        or [name for name in names if name.isidentifier()]
        or list(names)
        for kind, names in kinds.items()
    }


def layers_by_axes(paths: Iterable[str]) -> dict[str, list[str]]:
    """Returns the weights as a layer reads them, by their axes without those of stacks."""
    names: dict[str, list[str]] = {}
    for path in paths:
        axes = axes_of_path(path)
        layer_axes = path.rpartition("_")[2]
        name = path if layer_axes == axes else f"a layer of {path}"
        names.setdefault(layer_axes, []).append(name)
    return names


def names_of(tensor: Tensor) -> list[str]:
    """Returns the path of a weight, or the names on the line that makes a tensor, or that line."""
    path, is_made, line = tensor.name.partition(" at ")
    if not is_made:
        return [path]
    file, _, number = line.partition(":")
    text = linecache.getline(str(CHECKOUT / file), int(number)) if number else ""
    names = [n for n in named_tensors(text) if n.rpartition("_")[2].upper() == tensor.axes]
    return names or ([line] if line else [])


def legend(axes: Alphabet, kinds: Iterable[str]) -> list[tuple[str, str, str]]:
    """Explains the letters of some axes, in the order of the axis table."""
    letters = set("".join(kinds))
    rows = [
        (axis.letter, axis.name, axis.meaning)
        for axis in axes.by_letter.values()
        if {axis.letter, axis.letter.lower()} & letters
    ]
    if any(letter.islower() for letter in letters):
        rows.append(("lower case", "", "that axis, replicated under every layout"))
    return rows + ([("_", "", "whole under every layout")] if "_" in letters else [])
