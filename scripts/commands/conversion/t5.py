"""Imports and exports T5: Hugging Face's folders, and model directories."""

from pathlib import Path

from configs import json_reader
from configs.errors import UserError
from configs.paths import absolute, local_path
from data.sources.pair_kinds import Phrases
from data.tasks.translation import Translation
from data.tokenizers.sentence_piece import SentencePiece, SentencePieceVocab
from data.tokenizers.tokenizer_json import (
    GENERATION,
    TOKENIZER,
    TokenizerJson,
    TokenizerJsonVocab,
    how_to_make,
)
from data.vocab import EOS, PAD, Tokenizer, Vocab, make
from data.vocabs import TARGET_FILE, Vocabs
from models.transformer import Transformer
from scripts.commands.conversion import folders
from scripts.commands.conversion.flags import ExportT5Flags, ImportT5Flags
from scripts.commands.conversion.folders import config_of, note_import, task_name
from scripts.devices import start_devices
from trainer.checkpoints.huggingface import t5 as convert
from trainer.checkpoints.huggingface.folder import (
    INDEX,
    SETTINGS,
    TENSORS,
    Settings,
    existing,
    read_json,
    stored_tensors,
)
from trainer.checks import check_sides, check_vocabs
from trainer.model_dir import ModelDir
from trainer.optimizers.adafactor import Adafactor
from trainer.optimizers.schedules import Constant
from trainer.run import Run

VOCAB = "spiece.model"
LENGTH = 512
"""Tokens a row on either side, as T5 was trained."""


def import_t5(flags: ImportT5Flags) -> None:
    """Makes a model directory of a T5.  The settings choose its task and its further training."""
    start_devices()
    input, model_dir = local_path(flags.input, "--input"), flags.model_dir
    folders.check_new_run(model_dir)
    settings = read_json(input, SETTINGS)
    convert.check_settings(settings, input / SETTINGS)
    stored = {name: tensor.read() for name, tensor in stored_tensors(input).items()}
    tensors = convert.read_tensors(settings, stored)
    spec = convert.spec_of(settings, tensors)
    convert.check_weights(spec, tensors, input)
    tokenizer = tokenizer_of(input, convert.completed(settings))
    vocab = make(tokenizer, iter(()))
    vocabs = Vocabs(vocab, vocab)
    config = config_of(run_of(spec, tokenizer, model_dir), flags.settings)
    run = config.make(Run)
    convert.check_same(spec, run.model)
    check_sides(run)
    vocab_file = str(absolute(model_dir) / TARGET_FILE)
    if run.task.vocab.given_path != vocab_file or run.task.source_vocab_file != TARGET_FILE:
        raise UserError(
            "Translation.vocab: a T5 reads and writes its own vocabulary.  Unset Translation."
            f"source_vocab and the file of {type(tokenizer).__name__}."
        )
    check_vocabs(run, vocabs)
    folders.save_weights(model_dir, run, convert.params_of(spec, tensors))
    ModelDir(model_dir).save(config, run, vocabs)  # last: it is what makes a run of the folder
    why = f"which repeats {convert.SHARED} or which T5 does not read"
    left_out = (f"{name}, {why}" for name in sorted(stored.keys() - tensors.keys()))
    types = {tensor.dtype.name for tensor in tensors.values()}
    note_import(model_dir, left_out, types, sum(tensor.size for tensor in tensors.values()))


def export_t5(flags: ExportT5Flags) -> None:
    """Writes a model as a T5 that Hugging Face reads."""
    start_devices()
    output, directory = local_path(flags.output, "--output"), ModelDir(flags.model.model_dir)
    folders.check_new_folder(output, (SETTINGS, TENSORS, INDEX, VOCAB, TOKENIZER))
    run = directory.load(flags.model.gin_file, flags.model.gin_param).make(Run)
    settings, vocab = convert.settings_of(run.model), directory.vocabs(run.task).target
    assert isinstance(run.model, Transformer)
    files = {name: text.encode() for name, text in vocab.files.items()}
    if not isinstance(vocab, TokenizerJsonVocab):
        check_ids(vocab)
        files[VOCAB] = vocab.model
    ids = {convert.BEGIN: vocab.begin_id, convert.END: vocab.end_id, "pad_token_id": vocab.pad_id}
    files[SETTINGS] = folders.json_bytes({**settings, **ids})
    if GENERATION in files:
        generation = json_reader.read_json(files[GENERATION], Settings, GENERATION)
        files[GENERATION] = folders.json_bytes({**generation, **ids})
    weights = list(convert.weights_of(run.model))
    folders.export_weights(flags, output, weights, run.model.precision.store, files)


def check_ids(vocab: Vocab) -> None:
    """Refuses a vocabulary whose texts do not begin and end as T5's."""
    if not isinstance(vocab, SentencePieceVocab) or (vocab.begin_id, vocab.end_id) != (PAD, EOS):
        raise UserError(
            f"{TARGET_FILE}: texts begin with id {vocab.begin_id} and end with {vocab.end_id}.  "
            f"Legal for a T5: a SentencePiece model that has {PAD} (padding) and {EOS}, or a "
            f"{TOKENIZER}."
        )


def tokenizer_of(folder: Path, settings: Settings) -> Tokenizer:
    """Returns the settings of a folder's tokenizer, with the ids of config.json.

    A SentencePiece model with other ids leaves them to tokenizer.json, where any token can begin.
    """
    ids = [settings[convert.BEGIN], settings[convert.END]]
    if (folder / VOCAB).is_file() or not (folder / TOKENIZER).is_file():
        tokenizer = SentencePiece(model_file=str(existing(folder, VOCAB)))
        vocab = make(tokenizer, iter(()))
        if [vocab.begin_id, vocab.end_id] == ids:
            return tokenizer
        if not (folder / TOKENIZER).is_file():
            raise UserError(
                f"{folder / VOCAB}: texts begin with id {vocab.begin_id} and end with "
                f"{vocab.end_id}; {SETTINGS} says {ids[0]} ({convert.BEGIN}) and {ids[1]} "
                f"({convert.END}).  {how_to_make(folder)}"
            )
    path = str(folder / TOKENIZER)
    begin, end = make(TokenizerJson(path=path), iter(())).pieces(ids)
    return TokenizerJson(path=path, begin=begin, end=end)


def run_of(spec: Transformer, tokenizer: Tokenizer, model_dir: Path) -> Run:
    """Returns a run of a T5, with the phrases as text until the user names another task.

    It trains as T5 was fine-tuned: Adafactor at 0.001 (Raffel et al. 2020, section 3.1.2).
    """
    vocab_file = str(absolute(model_dir) / TARGET_FILE)
    kept: Tokenizer = SentencePiece(model_file=vocab_file)
    if isinstance(tokenizer, TokenizerJson):
        kept = TokenizerJson(path=vocab_file)
    return Run(
        model=spec,
        task=Translation(
            name=task_name("t5", model_dir),
            source=Phrases(language="en", target_language="de"),
            vocab=kept,
            length=LENGTH,
            source_length=LENGTH,
        ),
        optimizer=Adafactor(schedule=Constant(peak=0.001)),
        steps=1000,
        batch_sequences=16,
    )
