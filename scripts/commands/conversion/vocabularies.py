"""Finds the tokenizer of a folder of Hugging Face, and the run that an import begins with."""

from pathlib import Path
from typing import Any

from configs.errors import UserError
from configs.paths import absolute
from data.sources.pair_kinds import Phrases
from data.sources.text import Docstrings
from data.task import Task
from data.tasks.translation import Translation
from data.tokenizers.sentence_piece import SentencePiece, is_sentence_piece
from data.tokenizers.tokenizer_json import (
    GENERATION,
    TOKENIZER,
    TokenizerJson,
    eos_token_ids,
    how_to_make,
)
from data.vocab import Tokenizer, Vocab, make, read_model
from data.vocabs import TARGET_FILE
from models.transformer import Transformer
from scripts.commands.conversion.folders import task_name
from scripts.terminal import print_note
from trainer.checkpoints.huggingface.convert import IDS
from trainer.checkpoints.huggingface.families import Settings
from trainer.checkpoints.huggingface.folder import SETTINGS, read_json
from trainer.checkpoints.huggingface.tokenizer import SENTENCE_PIECES
from trainer.run import Run

MAX_LENGTH = 2048
"""Tokens a row of the first task: the model reads longer ones, if it was trained so."""
PAIR_LENGTH = 512
"""Tokens a row on either side, as T5 was trained."""


def tokenizer_of(folder: Path, ids: Settings | None = None) -> Tokenizer:
    """Returns the settings of the tokenizer of a folder.

    That of an encoder-decoder has the ids that its settings name: a SentencePiece model with
    others leaves them to tokenizer.json, where any token can begin.
    """
    models = [folder / name for name in SENTENCE_PIECES if (folder / name).is_file()]
    pieces = [file for file in models if is_sentence_piece(read_model(file))]
    has_json, other = (folder / TOKENIZER).is_file(), ""
    if pieces and (ids is not None or not has_json):
        tokenizer = SentencePiece(model_file=str(pieces[0]))
        vocab = make(tokenizer, iter(()))
        if ids is None or [vocab.begin_id, vocab.end_id] == [ids[name] for name in IDS]:
            return tokenizer
        other = (
            f", and {pieces[0].name} begins texts with id {vocab.begin_id} and ends them with "
            f"{vocab.end_id}; {SETTINGS} says {ids[IDS[0]]} ({IDS[0]}) and {ids[IDS[1]]} ({IDS[1]})"
        )
    elif models and not has_json:
        other = f", and {models[0].name} is not a SentencePiece model"
    if not has_json:
        raise UserError(f"--input={folder}: {TOKENIZER} is missing{other}.  {how_to_make(folder)}")
    path = str(folder / TOKENIZER)
    if ids is None:
        return TokenizerJson(path=path)
    begin, end = make(TokenizerJson(path=path), iter(())).pieces(ids[name] for name in IDS)
    return TokenizerJson(path=path, begin=begin, end=end)


def warn_of_other_ends(folder: Path, settings: Settings, vocab: Vocab) -> None:
    """Warns if Hugging Face's library ends a text at other tokens than decoding does."""
    is_there = (folder / GENERATION).is_file()
    ids = eos_token_ids({**settings, **(read_json(folder, GENERATION) if is_there else {})})
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
    """Returns a run on the docstrings or the phrases, until the user names another task."""
    vocab_file = str(absolute(model_dir) / TARGET_FILE)
    kept: Tokenizer = SentencePiece(model_file=vocab_file)
    if isinstance(tokenizer, TokenizerJson):
        kept = TokenizerJson(path=vocab_file)
    fields: dict[str, Any] = {"name": task_name("hf", model_dir), "vocab": kept}
    if spec.has_encoder:
        phrases = Phrases(language="en", target_language="de")
        task: Task = Translation(
            **fields, length=PAIR_LENGTH, source_length=PAIR_LENGTH, source=phrases
        )
    else:
        length = max(2, min(MAX_LENGTH, spec.length))
        task = Task(**fields, length=length, source=Docstrings())
    return Run(model=spec, task=task, steps=1000, batch_sequences=16)
