"""Converts models and adapters between Hugging Face's folders and model directories.

Weights stream from file to file, one layer of one weight at a time.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from flax import traverse_util

from configs import json_reader
from configs.errors import UserError
from configs.paths import absolute, local_path
from configs.write import dump
from data.storage.files import atomic_write
from data.tokenizers.marian import PIECES
from data.tokenizers.tokenizer_json import GENERATION, TOKENIZER, TokenizerJson
from data.vocab import make
from data.vocabs import SOURCE_FILE, TARGET_FILE, Vocabs
from models.precision import FloatType
from models.transformer import Transformer
from scripts.commands.conversion import folders, vocabularies
from scripts.commands.conversion.flags import (
    ExportHfFlags,
    ExportPeftFlags,
    ImportHfFlags,
    ImportPeftFlags,
)
from scripts.devices import start_devices
from trainer.checkpoints.huggingface import convert, mxfp4, peft
from trainer.checkpoints.huggingface.families import FAMILIES, SOFTMAX, Family, Settings
from trainer.checkpoints.huggingface.folder import (
    INDEX,
    SETTINGS,
    TENSORS,
    StoredTensor,
    existing,
    json_bytes,
    read_json,
    stored_tensors,
    tensors_of_file,
    with_joined_blocks,
)
from trainer.checkpoints.huggingface.tokenizer import SENTENCE_PIECES, source_files, tokenizer_files
from trainer.checkpoints.huggingface.weights import (
    ConvertedWeight,
    check_tensors,
    common_type,
    places_of,
)
from trainer.checkpoints.integrity import StreamedArray
from trainer.checkpoints.manager import Checkpoints
from trainer.checks import check_sides, check_vocabs
from trainer.model_dir import HUGGINGFACE, ModelDir
from trainer.run import Run

MODEL_FILE = "model.gin"
"""File with the settings of the model and its vocabulary alone, for runs that start from it."""
VOCABS = {TARGET_FILE: "vocab", SOURCE_FILE: "source_vocab"}
"""Settings of a task, by the vocab files that they name."""
FILES = (
    SETTINGS, GENERATION, TOKENIZER, "tokenizer_config.json",
    "special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "chat_template.json",
    "vocab.json", "merges.txt", *PIECES.values(), *SENTENCE_PIECES,
)  # fmt: skip
"""Files that are copied unchanged if a folder has them."""


def import_hf(flags: ImportHfFlags) -> None:
    """Makes a model directory from a model.  The settings choose its task."""
    start_devices()
    folder, model_dir = local_path(flags.input, "--input"), flags.model_dir
    folders.check_new_run(model_dir)
    whole = read_json(folder, SETTINGS)
    text_part = convert.text_part(whole)
    settings = mxfp4.without_method(text_part)
    convert.check_settings(settings, folder / SETTINGS)
    family = convert.family_of(settings, folder / SETTINGS)
    stored, images = with_joined_blocks(stored_tensors(folder)), list[str]()
    stored = {convert.full_name(name, family): tensor for name, tensor in stored.items()}
    if text_part is not whole:
        images = [name for name in stored if convert.text_name(name) is None]
        stored = {text: x for name, x in stored.items() if (text := convert.text_name(name))}
    copies = [name for name in stored if convert.is_copy(name, settings)]
    unread = check_copies(stored, copies, family, folder)
    unread += [name for name in stored if convert.is_unread(name, settings)]
    tensors = {name: tensor for name, tensor in stored.items() if name not in unread}
    infos = {name: tensor.info for name, tensor in tensors.items()}
    types = sorted({x.dtype for n, x in infos.items() if not re.fullmatch(family.tensors.wide, n)})
    spec = convert.spec_of(settings, common_type(types), folder / SETTINGS)
    tied, has_bias = spec.tied and SOFTMAX not in tensors, family.tensors.logit_bias in tensors
    spec = convert.with_tensors(spec, settings["model_type"], tied=tied, logit_bias=has_bias)
    weights = list(convert.weights_of(spec, family))
    check_tensors(weights, infos, folder, settings["model_type"])
    places = places_of(weights)
    parts = {name: tensors[place.tensor]._replace(place=place) for name, place in places.items()}

    ids = {**family.tokens, **settings} if family.has_encoder else None
    tokenizer = vocabularies.tokenizer_of(folder, ids)
    source_tokenizer = vocabularies.source_tokenizer_of(folder)
    first = vocabularies.run_of(spec, tokenizer, model_dir)
    config = folders.config_of(first, flags.settings)
    run = config.make(Run)
    convert.check_same(spec, run.model)
    assert isinstance(run.model, Transformer)
    check_sides(run)
    given, legal = given_vocabs(run), given_vocabs(first)
    if changed := [name for file, name in VOCABS.items() if given.get(file) != legal.get(file)]:
        raise UserError(
            f"{type(run.task).__name__}.{changed[0]}: an imported model uses its own vocabulary.  "
            "Do not change this setting or its file."
        )
    chosen = run.task.vocab  # it may name special tokens
    if isinstance(tokenizer, TokenizerJson) and isinstance(chosen, TokenizerJson):
        special = {name: getattr(chosen, name) for name in ("begin", "end", "pad")}
        named = {name: token for name, token in special.items() if token is not None}
        tokenizer = dataclasses.replace(tokenizer, **named)
    vocab = make(tokenizer, iter(()))
    source = vocab if family.has_encoder else None
    if source_tokenizer is not None:
        source = make(source_tokenizer, iter(()))
    vocabs = Vocabs(vocab, source)
    check_vocabs(run, vocabs)
    vocabularies.warn_of_other_ends(folder, settings, vocab)
    store = run.model.precision.store
    flat = {weight.path: streamed_array(weight, parts, weight.dtype(store)) for weight in weights}
    with Checkpoints(model_dir) as checkpoints:  # step 0, with only the weights
        checkpoints.save(0, {"params": traverse_util.unflatten_dict(flat, sep="/")})
    for name in FILES:
        if (folder / name).is_file():
            (model_dir / HUGGINGFACE).mkdir(parents=True, exist_ok=True)
            is_changed = name == SETTINGS and settings is not whole
            kept = json_bytes(settings) if is_changed else (folder / name).read_bytes()
            atomic_write(model_dir / HUGGINGFACE / name, kept)
    atomic_write(model_dir / MODEL_FILE, model_text(run))
    ModelDir(model_dir).save(config, run, vocabs)  # last, as this turns the folder into a run
    left_out = [f"{name}, which {settings['model_type']} does not read" for name in unread]
    if images:
        left_out.append(f"{len(images)} image tensors: Meshloom supports only the text part")
    count = sum(int(np.prod(info.shape)) for info in infos.values())
    folders.note_import(model_dir, left_out, types, count)


def given_vocabs(run: Run) -> dict[str, tuple[str | None, str | None]]:
    """Returns the path and the side of each trained vocabulary of a task, by file."""
    settings = run.task.vocab_settings.items()
    return {file: (vocab.given_path, getattr(vocab, "side", None)) for file, vocab in settings}


def model_text(run: Run) -> str:
    """Writes the settings of the model and of its vocabularies, for runs that start from it."""
    text = f"Run.model = @{type(run.model).__name__}()\n{dump([run.model])}"
    for file, vocab in run.task.vocab_settings.items():
        kind, name = type(vocab).__name__, VOCABS[file].upper()
        scoped = kind if file == TARGET_FILE else f"source/{kind}"
        text += f"\n{name} = @{scoped}()\n{dump([vocab]).replace(f'{kind}.', f'{scoped}.')}"
    return text


def check_copies(
    stored: Mapping[str, StoredTensor], copies: Sequence[str], family: Family, folder: Path
) -> list[str]:
    """Returns the tensors that repeat the embedding; refuses a tied one that differs from it."""
    embedding = family.tensors.embedding
    table = stored[embedding].read() if copies and embedding in stored else None
    equal = [name for name in copies if table is None or np.array_equal(stored[name].read(), table)]
    for name in copies:
        if name not in equal and not (name == SOFTMAX and family.unties):
            raise UserError(
                f"{folder / SETTINGS}: tie_word_embeddings = True, but {name} differs from "
                f"{embedding}.  Set it to false if the model uses {name}; otherwise, remove that "
                "tensor."
            )
    return equal


def streamed_array(
    weight: ConvertedWeight, tensors: Mapping[str, StoredTensor], dtype: FloatType
) -> StreamedArray:
    """Returns a weight that reads its tensors layer by layer while it is saved."""

    def read(layers: slice) -> np.ndarray:
        array = weight.from_tensors_by_name(lambda name: tensors[name].read(), layers)
        return array.astype(dtype)

    rows = 1 if weight.stack else weight.shape[0]
    return StreamedArray(weight.shape, np.dtype(dtype), read, rows)


def export_hf(flags: ExportHfFlags) -> None:
    """Writes a model in Hugging Face's format."""
    start_devices()
    output, model_dir = local_path(flags.output, "--output"), flags.model.model_dir
    folders.check_new_folder(output, (TENSORS, INDEX, *FILES))
    run = ModelDir(model_dir).load(flags.model.gin_file, flags.model.gin_param).make(Run)
    vocab = ModelDir(model_dir).vocabs(run.task).target
    kept = model_dir / HUGGINGFACE
    files = {name: (kept / name).read_bytes() for name in FILES if (kept / name).is_file()}
    model, settings, original = exported_model(model_dir, run)
    if original is None:
        kind = settings["model_type"]
        files, ids = source_files(vocab, kind) if model.has_encoder else tokenizer_files(vocab)
        settings |= ids
        if "max_position_embeddings" in settings:
            settings["max_position_embeddings"] = run.task.length
    if settings != original:
        files[SETTINGS] = json_bytes(settings)
    weights = list(convert.weights_of(model, FAMILIES[settings["model_type"]]))
    factors, store = convert.factors(model, settings), model.precision.store
    merged = None if run.model.adapter is None else run
    folders.export_weights(flags, output, weights, store, files, factors, TENSORS, merged)


def exported_model(model_dir: Path, run: Run) -> tuple[Transformer, Settings, Settings | None]:
    """Returns a model without adapters, its config.json, and the one that an import kept."""
    kept, model, original = model_dir / HUGGINGFACE / SETTINGS, run.merged.model, None
    if kept.is_file():
        original = json_reader.read_json(kept.read_bytes(), Settings, SETTINGS)
    settings = convert.exported_settings(model, original)
    assert isinstance(model, Transformer)
    return model, settings, original


def import_peft(flags: ImportPeftFlags) -> None:
    """Makes a model directory from adapters; it starts from the directory of their model."""
    start_devices()
    folder, model_dir = local_path(flags.input, "--input"), flags.model_dir
    folders.check_new_run(model_dir)
    file, settings = existing(folder, peft.TENSORS), read_json(folder, peft.SETTINGS)
    peft.check_settings(settings, folder / peft.SETTINGS)
    base = ModelDir(flags.start_from).load().make(Run)
    model, of_model, _ = exported_model(flags.start_from, base)
    tensors = {tensor.name: tensor for tensor in tensors_of_file(file)}
    infos = {name: tensor.info for name, tensor in tensors.items()}
    family, start_from = FAMILIES[of_model["model_type"]], str(absolute(flags.start_from))
    adapter = peft.adapter_of(model, family, settings, infos)
    weights = peft.weights_of(model, adapter, family)
    check_tensors(weights, infos, file, f"LoRA of {flags.start_from}")
    model = dataclasses.replace(model, adapter=adapter)
    base = dataclasses.replace(base, model=model, start_from=start_from)
    fixed = f"Transformer.adapter = @Lora()\n{dump([adapter])}"  # overrides model.gin and lora.gin
    config = folders.config_of(base, flags.settings, fixed)
    run, flat = config.make(Run), {}
    convert.check_same(model, run.model)
    for weight in weights:
        array = weight.from_tensors_by_name(lambda name: tensors[name].read())
        flat[weight.path] = array.astype(adapter.store)
    folders.save_weights(model_dir, run, traverse_util.unflatten_dict(flat, sep="/"))
    ModelDir(model_dir).keep_imported(start_from)
    (model_dir / HUGGINGFACE).mkdir(exist_ok=True)
    atomic_write(model_dir / HUGGINGFACE / peft.SETTINGS, (folder / peft.SETTINGS).read_bytes())
    ModelDir(model_dir).save(config, run, ModelDir(flags.start_from).vocabs(base.task))
    folders.note_import(model_dir, (), (), sum(array.size for array in flat.values()))


def export_peft(flags: ExportPeftFlags) -> None:
    """Writes the adapters of a run in PEFT's format."""
    start_devices()
    output, model_dir = local_path(flags.output, "--output"), flags.model.model_dir
    folders.check_new_folder(output, (peft.SETTINGS, peft.TENSORS))
    run = ModelDir(model_dir).load(flags.model.gin_file, flags.model.gin_param).make(Run)
    adapter, (model, settings, _) = run.model.adapter, exported_model(model_dir, run)
    if adapter is None:
        raise UserError(f"{model_dir}: no adapters there.  `meshloom export hf` writes the model.")
    weights = peft.weights_of(model, adapter, family := FAMILIES[settings["model_type"]])
    kept = model_dir / HUGGINGFACE / peft.SETTINGS
    made = json_bytes(peft.settings_of(model, adapter, family, weights))
    files = {peft.SETTINGS: kept.read_bytes() if kept.is_file() else made}
    stems = {f"/{p.rpartition('_')[0]}/b_": f for p, f in convert.factors(model, settings).items()}
    scales = {w.path: f for w in weights for stem, f in stems.items() if stem in w.path}
    folders.export_weights(flags, output, weights, adapter.store, files, scales, peft.TENSORS)
