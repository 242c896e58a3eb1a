"""Finds the tokenizer in a folder of Hugging Face, and defines the first run of an import."""

import re
from pathlib import Path
from typing import Any

from configs.errors import UserError
from configs.paths import absolute
from data.sources.pair_kinds import Phrases
from data.sources.text import Docstrings
from data.task import Task
from data.tasks.translation import Translation
from data.tokenizers import tokenizer_json
from data.tokenizers.marian import PIECES, Marian
from data.tokenizers.sentence_piece import SentencePiece, processor_of
from data.tokenizers.tokenizer_json import CONFIG, GENERATION, TOKENIZER, TokenizerJson, how_to_make
from data.vocab import Tokenizer, Vocab, make, read_model
from data.vocabs import SOURCE_FILE, TARGET_FILE
from models.transformer import Transformer
from scripts.terminal import print_note
from trainer.checkpoints.huggingface.convert import IDS
from trainer.checkpoints.huggingface.families import Settings
from trainer.checkpoints.huggingface.folder import SETTINGS, read_json
from trainer.checkpoints.huggingface.tokenizer import SENTENCE_PIECES
from trainer.run import Run

MAX_LENGTH = 2048
"""Tokens per row of the first task; the model accepts longer rows if it was trained on them."""
PAIR_LENGTH = 512
"""Tokens per row on each side, as T5 was trained."""


def tokenizer_of(folder: Path, ids: Settings | None = None) -> Tokenizer:
    """Returns the settings of the tokenizer in a folder.

    The tokenizer of an encoder-decoder must use the begin and end ids in the model's settings.  If
    a SentencePiece model has others, tokenizer.json is used, where any token can begin a text.  A
    T5's tokenizer.json also has the sentinels, which its SentencePiece model lacks.
    """
    models = [folder / name for name in SENTENCE_PIECES if (folder / name).is_file()]
    pieces = [file for file in models if processor_of(read_model(file)) is not None]
    has_json, other = (folder / TOKENIZER).is_file(), ""
    model: Tokenizer | None = None
    if source_tokenizer_of(folder) is not None:
        model = Marian(path=str(folder))
    elif pieces and not (has_json and (ids is None or (folder / CONFIG).is_file())):
        model = SentencePiece(model_file=str(pieces[0]))
    elif models and not has_json:
        other = f", and {models[0].name} is not a SentencePiece model"
    if model is not None:
        vocab = make(model, iter(()))
        if ids is None or [vocab.begin_id, vocab.end_id] == [ids[name] for name in IDS]:
            return model
        other = (
            f", and @{type(model).__name__}() begins texts with id {vocab.begin_id} and ends them "
            f"with {vocab.end_id}; {SETTINGS} says {ids[IDS[0]]} ({IDS[0]}) and {ids[IDS[1]]} "
            f"({IDS[1]})"
        )
    if not has_json:
        raise UserError(f"--input={folder}: {TOKENIZER} is missing{other}.  {how_to_make(folder)}")
    path = str(folder / TOKENIZER)
    if ids is None:
        return TokenizerJson(path=path)
    begin, end = make(TokenizerJson(path=path), iter(())).pieces(ids[name] for name in IDS)
    return TokenizerJson(path=path, begin=begin, end=end)


def source_tokenizer_of(folder: Path) -> Tokenizer | None:
    """Returns the settings of the tokenizer for sources, if targets have another one."""
    is_there = any((folder / name).is_file() for name in PIECES.values())
    return Marian(path=str(folder), side="source") if is_there else None


def warn_of_other_ends(folder: Path, settings: Settings, vocab: Vocab) -> None:
    """Warns if Hugging Face's library ends texts at other tokens than decoding does."""
    given = read_json(folder, GENERATION) if (folder / GENERATION).is_file() else {}
    ids = tokenizer_json.eos_token_ids({**settings, **given})
    if not ids or {*ids} == {*vocab.stop_ids}:
        return
    listed, stops = (
        ", ".join(vocab.pieces(i for i in some if 0 <= i < vocab.size)) or "none"
        for some in (ids, vocab.stop_ids)
    )
    print_note(
        f"Warning: eos_token_id = {ids}: Hugging Face's library ends texts at {listed}; "
        f"`meshloom decode` ends them at {stops}: at TokenizerJson.end and eos_token_id in "
        f"{GENERATION}."
    )


def run_of(spec: Transformer, tokenizer: Tokenizer, model_dir: Path) -> Run:
    """Returns a run on the docstrings or the phrases, for use until the user names another task."""
    path = str(absolute(model_dir) / TARGET_FILE)
    name = re.sub(r"[^A-Za-z0-9_.-]", "_", absolute(model_dir).name)  # a folder's name in data_dir
    fields: dict[str, Any] = {"name": f"hf_{name}"}
    fields["vocab"] = SentencePiece(model_file=path)
    if isinstance(tokenizer, TokenizerJson):
        fields["vocab"] = TokenizerJson(path=path)
    if isinstance(tokenizer, Marian):
        source = str(absolute(model_dir) / SOURCE_FILE)
        fields |= {"vocab": Marian(path=path), "source_vocab": Marian(path=source, side="source")}
    if spec.has_encoder:
        phrases = Phrases(language="en", target_language="de")
        length = min(PAIR_LENGTH, spec.max_length or PAIR_LENGTH)
        task: Task = Translation(**fields, length=length, source_length=length, source=phrases)
    else:
        length = max(2, min(MAX_LENGTH, spec.length, spec.max_length or MAX_LENGTH))
        task = Task(**fields, length=length, source=Docstrings())
    return Run(model=spec, task=task, steps=1000, batch_sequences=16)
