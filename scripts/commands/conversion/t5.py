"""Imports and exports T5: Hugging Face's folders, and model directories."""

import json
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path

import jax
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from configs.errors import UserError, brief
from configs.load import Config, load
from configs.paths import absolute, local_path
from configs.write import dump
from data.sources.pair_kinds import Phrases
from data.storage import atomic_path, atomic_write
from data.task import Translation
from data.tokenizers.sentence_piece import SentencePiece, SentencePieceVocab
from data.vocab import EOS, PAD, Vocab, make
from data.vocabs import TARGET_FILE, Vocabs
from layouts.layout import Layout
from layouts.mesh import make_mesh
from models.api import Params
from models.architectures import Transformer
from scripts.commands.conversion.flags import ExportT5Flags, ImportT5Flags
from scripts.commands.shared_flags import SettingsFlags
from scripts.commands.trained import only, trained_models
from scripts.terminal import print_note
from trainer.checkpoints import huggingface
from trainer.checkpoints.manager import Checkpoints
from trainer.checkpoints.restore import chosen_steps
from trainer.checks import check_sides, check_vocabs
from trainer.model_dir import ModelDir
from trainer.optimizers.adafactor import Adafactor
from trainer.optimizers.schedules import Constant
from trainer.run import Run
from trainer.step import abstract_state, train_step_spec

SETTINGS, TENSORS, VOCAB = "config.json", "model.safetensors", "spiece.model"
INDEX = f"{TENSORS}.index.json"
"""Names the file of each tensor, where there are several."""
LENGTH = 512
"""Tokens a row on either side, as T5 was trained."""


def import_t5(flags: ImportT5Flags) -> None:
    """Makes a model directory of a T5.  The settings choose its task and its further training."""
    input, model_dir = local_path(flags.input, "--input"), flags.model_dir
    check_new_run(model_dir)
    settings = read_json(input, SETTINGS)
    huggingface.check_settings(settings, input / SETTINGS)
    stored = read_folder(input)
    tensors = huggingface.read_tensors(settings, stored)
    spec = huggingface.spec_of(settings, tensors)
    huggingface.check_tensors(spec, tensors, input)
    vocab = make(SentencePiece(model_file=str(existing(input, VOCAB))), iter(()))
    check_ids(vocab, str(input / VOCAB))
    vocabs = Vocabs(vocab, vocab)
    config = config_of(run_of(spec, model_dir), flags.settings)
    run = config.make(Run)
    check_run(run, spec, vocabs, model_dir)
    save_weights(model_dir, run, huggingface.params_of(spec, tensors))
    ModelDir(model_dir).save(config, run, vocabs)  # last: it is what makes a run of the folder
    for name in sorted(stored.keys() - tensors.keys()):
        print_note(
            f"Left out: {name}, which repeats {huggingface.SHARED} or which T5 does not read."
        )
    types = sorted({tensor.dtype.name for tensor in tensors.values()})
    if len(types) > 1:
        print_note(f"Stored as float32: the tensors are of several types, {' and '.join(types)}.")
    weights = sum(tensor.size for tensor in tensors.values())
    print_note(f"Imported {weights:,} weights into {model_dir}.")


def export_t5(flags: ExportT5Flags) -> None:
    """Writes a model as a T5 that Hugging Face reads."""
    output = flags.output
    check_new_folder(output)
    with trained_models(flags.model) as models:
        settings = huggingface.settings_of(models.run.model)
        trained = models.restore(
            only(chosen_steps(models.checkpoints, flags.model.checkpoint)), flags.model.average
        )
        spec = trained.run.model
        assert isinstance(spec, Transformer)
        tensors = huggingface.tensors_of(spec, jax.device_get(trained.params))
        vocab = trained.vocabs.target
    check_ids(vocab, TARGET_FILE)
    write_folder(output, settings, tensors, vocab.model)
    weights = sum(tensor.size for tensor in tensors.values())
    print_note(f"Exported {weights:,} weights of step {trained.step} to {output}.")


# Folders as Hugging Face writes them


def existing(folder: Path, name: str) -> Path:
    """Returns the path of a file of a folder."""
    if not folder.is_dir():
        raise UserError(f"--input={folder}: there is no such folder.")
    if not (folder / name).is_file():
        raise UserError(
            f"--input={folder}: {name} is missing.  Legal: a folder with {SETTINGS}, {TENSORS} (or "
            f"{INDEX} and the files that it names) and {VOCAB}, as save_pretrained writes them."
        )
    return folder / name


def read_json(folder: Path, name: str) -> dict:
    path = existing(folder, name)
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: is not JSON: {error}.") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: holds a {type(content).__name__}.  Legal: an object.")
    return content


def read_folder(folder: Path) -> huggingface.Tensors:
    """Reads all tensors of a folder, from one file or from several."""
    if (folder / TENSORS).is_file() or not (folder / INDEX).is_file():
        return read_tensors(existing(folder, TENSORS))
    parts = read_json(folder, INDEX).get("weight_map")
    if not isinstance(parts, dict):
        raise UserError(f"{folder / INDEX}: weight_map is missing.  Save the model again.")
    odd = [name for name in parts.values() if not isinstance(name, str) or Path(name).name != name]
    if odd:
        raise UserError(
            f"{folder / INDEX}: weight_map names {brief(repr(odd[0]))}.  "
            "Legal: files of this folder."
        )
    tensors: huggingface.Tensors = {}
    for name in sorted(set(parts.values())):
        tensors |= read_tensors(existing(folder, name))
    return tensors


def read_tensors(path: Path) -> huggingface.Tensors:
    try:
        with safe_open(path, "numpy") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, TypeError) as error:
        raise UserError(f"{path}: cannot be read as safetensors: {error}.") from None


def check_ids(vocab: Vocab, name: str) -> None:
    """Refuses a vocabulary whose texts do not begin and end as T5's."""
    if not isinstance(vocab, SentencePieceVocab) or (vocab.begin_id, vocab.end_id) != (PAD, EOS):
        raise UserError(
            f"{name}: texts begin with id {vocab.begin_id} and end with {vocab.end_id}.  Legal for "
            f"a T5: a SentencePiece model that has {PAD} (padding) and {EOS}."
        )


def check_new_folder(folder: Path) -> None:
    """Refuses a folder that holds a model already."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--output={folder}: is a file.  Choose a folder.")
    taken = [name for name in (SETTINGS, TENSORS, INDEX, VOCAB) if (folder / name).exists()]
    if taken:
        raise UserError(f"--output={folder}: holds {', '.join(taken)} already.  Choose another.")


def write_folder(
    folder: Path, settings: huggingface.Settings, tensors: huggingface.Tensors, vocab: bytes
) -> None:
    """Writes what Hugging Face reads; each file appears when it is whole, the settings last."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Without this note Hugging Face takes the file for another library's.
        with atomic_path(folder / TENSORS) as temporary:
            save_file(tensors, temporary, {"format": "pt"})
        atomic_write(folder / VOCAB, vocab)
        atomic_write(folder / SETTINGS, json.dumps(settings, indent=2, sort_keys=True) + "\n")
    except (OSError, SafetensorError) as error:
        raise UserError(f"--output={folder}: cannot be written: {error}.") from None


# Model directories


def check_new_run(model_dir: Path) -> None:
    """Refuses a model directory that holds a run already."""
    if model_dir.exists() and not model_dir.is_dir():
        raise UserError(f"--model_dir={model_dir}: is a file.  Choose a folder.")
    if ModelDir(model_dir).has_run():
        raise UserError(f"--model_dir={model_dir}: holds a run already.  Choose another.")


def run_of(spec: Transformer, model_dir: Path) -> Run:
    """Returns a run of a T5, with the phrases as text until the user names another task.

    It trains as T5 was fine-tuned: Adafactor at 0.001 (Raffel et al. 2020, section 3.1.2).
    """
    folder = absolute(model_dir)
    return Run(
        model=spec,
        task=Translation(
            name="t5_" + re.sub(r"[^A-Za-z0-9_.-]", "_", folder.name),
            source=Phrases(language="en", target_language="de"),
            vocab=SentencePiece(model_file=str(folder / TARGET_FILE)),
            length=LENGTH,
            source_length=LENGTH,
        ),
        optimizer=Adafactor(schedule=Constant(peak=0.001)),
        steps=1000,
        batch_sequences=16,
    )


def config_of(run: Run, settings: SettingsFlags) -> Config:
    """Returns the settings of a run, under the given ones; warns of those that nothing uses."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "huggingface.gin"
        file.write_text(dump([run]))
        config = load([str(file), *settings.gin_file], settings.gin_param)
    for binding in config.unused(Run, Layout):
        if not binding.origin.startswith(str(file)):
            print_note(f"Warning: {binding.origin}: {binding.name} is set, but nothing uses it.")
    return config


def check_run(run: Run, spec: Transformer, vocabs: Vocabs, model_dir: Path) -> None:
    """Refuses settings that do not go with a T5's weights and vocabulary."""
    huggingface.check_same(spec, run.model)
    check_sides(run)
    vocab_file = str(absolute(model_dir) / TARGET_FILE)
    if run.task.vocab.given_path != vocab_file or run.task.source_vocab_file != TARGET_FILE:
        raise UserError(
            "Translation.vocab: a T5 reads and writes its own vocabulary.  Unset Translation."
            "source_vocab and SentencePiece.model_file."
        )
    check_vocabs(run, vocabs)


def save_weights(model_dir: Path, run: Run, params: Mapping[str, np.ndarray]) -> None:
    """Saves weights and a new opt_state as the checkpoint of step 0."""
    layout = Layout(mesh="data:1", rules="")
    mesh, program = make_mesh(layout), train_step_spec(run, layout)
    abstract = abstract_state(program, mesh)

    def put(x: np.ndarray | jax.Array, like: jax.ShapeDtypeStruct) -> jax.Array:
        assert x.shape == like.shape and x.dtype == like.dtype, (x.shape, like)
        return jax.device_put(x, like.sharding)

    with jax.set_mesh(mesh), Checkpoints(model_dir) as checkpoints:
        weights: Params = jax.tree.map(put, params, abstract["params"])
        opt_state = jax.jit(program.transform().init)(weights)
        opt_state = jax.tree.map(put, opt_state, abstract["opt_state"])
        step = put(np.zeros((), np.int32), abstract["step"])
        checkpoints.save(0, {"params": weights, "opt_state": opt_state, "step": step})
