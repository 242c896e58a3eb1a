"""Defines what imports and exports share: checks of folders, run settings, and notes."""

import fnmatch
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import jax
import numpy as np
from flax import traverse_util

from configs.errors import UserError, brief
from configs.load import Config, load
from configs.write import dump
from data.storage.files import atomic_write
from data.vocabs import SOURCE_FILE, TARGET_FILE
from layouts.layout import Layout
from layouts.mesh import make_mesh
from models.api import Params
from models.precision import FloatType
from scripts.commands.common import warn_unused
from scripts.commands.conversion.flags import ExportHfFlags
from scripts.commands.shared_flags import SettingsFlags
from scripts.commands.trained import single_checkpoint
from scripts.terminal import print_note
from trainer.checkpoints import restore
from trainer.checkpoints.huggingface.folder import SETTINGS, tensor_writer
from trainer.checkpoints.huggingface.weights import ConvertedWeight, TensorInfo, places_of
from trainer.checkpoints.manager import Checkpoints
from trainer.model_dir import HUGGINGFACE, ModelDir
from trainer.resume.history import CHECKPOINTS, FILE
from trainer.run import Run
from trainer.step import abstract_state, train_step_spec

LEFT_BY_IMPORTS = (
    CHECKPOINTS, FILE, "model.gin", HUGGINGFACE, TARGET_FILE, SOURCE_FILE, ".*.tmp"
)  # fmt: skip
"""What an interrupted import may leave in a model directory."""
MAX_FILE_BYTES = 5 * 10**9
"""Size limit of a file with tensors, as Hugging Face has it."""


def check_new_run(model_dir: Path) -> None:
    """Refuses a model directory that already holds a run."""
    if model_dir.exists() and not model_dir.is_dir():
        raise UserError(f"--model_dir={model_dir}: is a file.  Choose a folder.")
    if ModelDir(model_dir).has_run():
        raise UserError(f"--model_dir={model_dir}: already contains a run.  Choose another.")
    names = sorted(file.name for file in model_dir.iterdir()) if model_dir.exists() else []
    left = {name for pattern in LEFT_BY_IMPORTS for name in fnmatch.filter(names, pattern)}
    if other := [name for name in names if name not in left]:
        raise UserError(
            f"--model_dir={model_dir}: contains {brief(', '.join(other))}.  Choose a new folder, "
            "or an empty one."
        )


def check_new_folder(folder: Path, names: Iterable[str]) -> None:
    """Refuses a folder that already holds one of these files."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--output={folder}: is a file.  Choose a folder.")
    if taken := [name for name in names if (folder / name).exists()]:
        raise UserError(f"--output={folder}: already contains {', '.join(taken)}.  Choose another.")


def config_of(run: Run, settings: SettingsFlags, fixed: str = "") -> Config:
    """Returns the settings of a run, overridden by the given ones; warns about unused settings.

    `fixed` overrides files, and `--gin_param` overrides `fixed`.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "huggingface.gin"
        file.write_text(dump([run]))
        config = load([str(file), *settings.gin_file], [fixed, *settings.gin_param])
    warn_unused(config, Run, Layout)
    return config


def note_import(model_dir: Path, left_out: Iterable[str], types: Sequence[str], count: int) -> None:
    """Prints what was imported, and what was left out and why."""
    print_note(*(f"Left out: {tensor}." for tensor in left_out))
    if len(types) > 1:
        print_note(f"Stored as float32: the tensors are of several types, {' and '.join(types)}.")
    print_note(f"Imported {count:,} weights into {model_dir}.")


def export_weights(
    flags: ExportHfFlags,
    output: Path,
    weights: Sequence[ConvertedWeight],
    dtype: FloatType,
    files: Mapping[str, bytes],
    factors: Mapping[str, float],
    name: str,
    merged: Run | None = None,
) -> None:
    """Writes the weights of a run one after another, then its files, with the settings last.

    `factors` holds factors of some weights, by path.  `merged` is a run with adapters.
    """
    average, run = flags.model.average, ModelDir(flags.model.model_dir).recorded_run()
    root = restore.weights_path(run, average) if merged is None else "params"
    by_path = {f"{root}/{weight.path}": weight for weight in weights}
    shapes = {path: weight.shape for path, weight in by_path.items()}
    places = places_of(weights)
    typed = [(places[name], weight.dtype(dtype)) for weight in weights for name in weight.names]
    infos = {place.tensor: TensorInfo(place.shape, kind) for place, kind in typed}
    with Checkpoints(flags.model.model_dir) as checkpoints:
        steps = exported_steps(checkpoints, flags.model.checkpoint, average)
        try:
            output.mkdir(parents=True, exist_ok=True)
            with tensor_writer(output, infos, MAX_FILE_BYTES, name) as write:
                by_step = [checkpoints.arrays(step, shapes) for step in steps]
                if merged is not None:
                    layout = Layout(mesh="data:1", rules="")
                    with restore.ModelRestorer(flags.model.model_dir, merged, layout) as models:
                        params = models.restore(steps[-1], average).params
                    flat = traverse_util.flatten_dict({"params": params}, sep="/")
                    by_step = [((path, np.asarray(flat[path])) for path in shapes)]
                for arrays in zip(*by_step, strict=True):
                    path, array = arrays[0]
                    if len(arrays) > 1:
                        array = sum(one.astype(np.float32) for _, one in arrays) / len(arrays)
                    if (factor := factors.get(by_path[path].path)) is not None:
                        array = array.astype(np.float32) * np.float32(factor)
                    for name, tensor in by_path[path].to_tensors_by_name(array):
                        write(places[name], tensor.astype(infos[places[name].tensor].dtype))
            for name in sorted(files, key=lambda name: name == SETTINGS):
                atomic_write(output / name, files[name])
        except OSError as error:
            raise UserError(f"--output={output}: cannot be written: {error}.") from None
    count = sum(int(np.prod(weight.shape)) for weight in weights)
    of = f"step{'s' * (len(steps) > 1)} {', '.join(map(str, steps))}"
    print_note(f"Exported {count:,} weights of {of} to {output}.")


def exported_steps(checkpoints: Checkpoints, which: str, average: str | None) -> list[int]:
    """Returns the steps whose weights are exported, averaged if there are several."""
    step = single_checkpoint(checkpoints, which)
    if average is not None and average != restore.EMA:
        return restore.averaged_steps(checkpoints, step, average)
    whole = (step for step in checkpoints.steps()[::-1] if checkpoints.damage(step) is None)
    step = next(whole, None) if step is None else step
    if step is None:
        raise UserError(f"{checkpoints.folder}: there is no complete checkpoint.")
    return [step]


def save_weights(model_dir: Path, run: Run, params: Mapping[str, np.ndarray]) -> None:
    """Saves weights and a new opt_state as the checkpoint of step 0."""
    layout = Layout(mesh="data:1", rules="")
    mesh, step_spec = make_mesh(layout), train_step_spec(run, layout)
    abstract = step_spec.saved(abstract_state(step_spec, mesh))

    def put(x: np.ndarray | jax.Array, like: jax.ShapeDtypeStruct) -> jax.Array:
        assert x.shape == like.shape and x.dtype == like.dtype, (x.shape, like)
        return jax.device_put(x, like.sharding)

    with jax.set_mesh(mesh), Checkpoints(model_dir) as checkpoints:
        weights: Params = jax.tree.map(put, params, abstract["params"])
        opt_state = jax.jit(step_spec.transform().init)(weights)
        opt_state = jax.tree.map(put, opt_state, abstract["opt_state"])
        others = {name: abstract[name] for name in abstract.keys() - {"params", "opt_state"}}
        state = jax.tree.map(lambda like: put(np.zeros((), like.dtype), like), others)
        state |= {"params": weights, "opt_state": opt_state}
        if "base" in state:
            restore.StatePadding(step_spec, mesh).add_base(state, run)
        checkpoints.save(0, step_spec.saved(state))
