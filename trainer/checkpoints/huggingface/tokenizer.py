"""Writes files with which Hugging Face's library tokenizes like a vocab."""

from collections.abc import Mapping
from typing import Any

import tokenizers
from sentencepiece import sentencepiece_model_pb2 as proto
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from configs.errors import UserError
from configs.json_reader import read_json
from data.tokenizers.tokenizer_json import CONFIG, GENERATION, TOKENIZER, TokenizerJsonVocab
from data.vocab import EOS, PAD, Vocab
from trainer.checkpoints.huggingface.folder import json_bytes

SENTENCE_PIECE, T5_PIECES = SENTENCE_PIECES = ("tokenizer.model", "spiece.model")
"""File names of SentencePiece models."""
_SPACE = "▁"
_Piece = proto.ModelProto.SentencePiece
_PRIVATE = 0xE000  # characters for private use, which no normalization changes
_CHARACTER = 1024.0
"""Added to unigram's scores for each character, so all splits of a text gain the same."""


def special_ids(vocab: Vocab, unknown_id: int | None = None) -> dict[str, int]:
    """Returns the ids of special tokens by their names in Hugging Face's settings.

    The library masks padding and does not train its embedding.  So padding is never the token
    that begins a text, even if a decoder of Meshloom reads padding first.
    """
    pads = (vocab.pad_id, unknown_id, vocab.end_id)
    pad = next((i for i in pads if i is not None and i != vocab.begin_id), vocab.end_id)
    return {"bos_token_id": vocab.begin_id, "eos_token_id": vocab.end_id, "pad_token_id": pad}


def tokenizer_files(vocab: Vocab) -> tuple[dict[str, bytes], dict[str, int]]:
    """Returns the files of a model with this vocab, and its ids of special tokens.

    The tokenizer puts the beginning token before each text, as Meshloom's decoders expect.
    """
    kept: Mapping[str, str] = vocab.files
    if isinstance(vocab, TokenizerJsonVocab):
        tokenizer, ids = tokenizers.Tokenizer.from_str(kept[TOKENIZER]), special_ids(vocab)
        files = {name: text.encode() for name, text in kept.items()}
        names: dict[str, Any] = {}
    else:
        model = proto.ModelProto.FromString(vocab.model)
        tokenizer = sentence_piece_tokenizer(model)
        ids = special_ids(vocab, model.trainer_spec.unk_id)
        files = {SENTENCE_PIECE: vocab.model}
        names = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "unk_token": model.pieces[model.trainer_spec.unk_id].piece,
            "clean_up_tokenization_spaces": False,
            "split_special_tokens": True,  # "</s>" in a text is text
        }
    [begin] = vocab.pieces([vocab.begin_id])
    if vocab.begin_id not in tokenizer.encode("a").ids[:1]:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[begin, "$A"],
            pair=[begin, "$A", "$B:1"],
            special_tokens=[(begin, vocab.begin_id)],
        )
        files[TOKENIZER] = tokenizer.to_str(pretty=True).encode()
    for name, i in ids.items():
        [names[name.removesuffix("_id")]] = vocab.pieces([i])
    config = read_json(kept.get(CONFIG, "{}"), dict[str, Any], CONFIG)
    files[CONFIG] = json_bytes({**config, **names})
    ends = vocab.stop_ids if len(vocab.stop_ids) > 1 else vocab.end_id
    generation = read_json(kept.get(GENERATION, "{}"), dict[str, Any], GENERATION)
    files[GENERATION] = json_bytes({**generation, **ids, "eos_token_id": ends})
    return files, ids


def source_files(vocab: Vocab, kind: str) -> tuple[dict[str, bytes], dict[str, int]]:
    """Returns the files of an encoder-decoder with this vocab, and its ids of special tokens.

    A tokenizer of sources puts no token before them.
    """
    if kind == "marian":
        raise UserError(
            "Hugging Face's marian has vocab.json, source.spm and target.spm, which only a run "
            "that starts from an import has (Run.start_from)."
        )
    files = {name: text.encode() for name, text in vocab.files.items()}
    if not files:
        if (vocab.begin_id, vocab.end_id) != (PAD, EOS):
            raise UserError(
                f"vocab.model: texts begin with id {vocab.begin_id} and end with {vocab.end_id}.  "
                f"Legal for a T5: a SentencePiece model that has {PAD} (padding) and {EOS}, or a "
                f"{TOKENIZER}."
            )
        files[T5_PIECES] = vocab.model
    pad_id = vocab.begin_id if vocab.pad_id is None else vocab.pad_id
    ids = {
        "decoder_start_token_id": vocab.begin_id,
        "eos_token_id": vocab.end_id,
        "pad_token_id": pad_id,
    }
    if GENERATION in files:
        generation = read_json(files[GENERATION], dict[str, Any], GENERATION)
        files[GENERATION] = json_bytes({**generation, **ids})
    return files, ids


def sentence_piece_tokenizer(model: proto.ModelProto) -> tokenizers.Tokenizer:
    """Makes a Hugging Face tokenizer that gives the same ids as a SentencePiece model."""
    pieces, unknown = list(model.pieces), model.trainer_spec.unk_id
    is_unigram = model.trainer_spec.model_type == proto.TrainerSpec.UNIGRAM
    tokenizer = tokenizers.Tokenizer((_unigram if is_unigram else _bpe)(pieces, unknown))
    words = [piece.piece for piece in pieces if piece.type == _Piece.USER_DEFINED]
    tokenizer.normalizer = normalizers.Sequence(_normalizers(model.normalizer_spec, words))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(word, "isolated") for word in words]
    )
    chain: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if model.normalizer_spec.add_dummy_prefix:
        chain.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(chain)
    special = [piece.piece for piece in pieces if piece.type in (_Piece.CONTROL, _Piece.UNKNOWN)]
    tokenizer.add_special_tokens(
        [tokenizers.AddedToken(token, special=True, normalized=False) for token in special]
    )
    return tokenizer


def _normalizers(settings: proto.NormalizerSpec, words: list[str]) -> list[normalizers.Normalizer]:
    """Returns the normalizers, in order; they leave user-defined words unchanged."""
    chain: list[normalizers.Normalizer] = []
    if settings.precompiled_charsmap:
        private = [(word, chr(_PRIVATE + i)) for i, word in enumerate(words)]
        chain += [normalizers.Replace(word, stand_in) for word, stand_in in private]
        chain.append(normalizers.Precompiled(settings.precompiled_charsmap))
        chain += [normalizers.Replace(stand_in, word) for word, stand_in in private]
    if settings.remove_extra_whitespaces:
        chain += [
            normalizers.Replace(tokenizers.Regex(" {2,}"), " "),
            normalizers.Replace(tokenizers.Regex(rf"\A |[ {_SPACE}]+\z"), ""),
        ]
    if settings.add_dummy_prefix:
        chain.append(normalizers.Prepend(_SPACE))
    return [*chain, normalizers.Replace(" ", _SPACE)]


def _bpe(pieces: list[Any], unknown: int) -> models.BPE:
    """Makes a BPE model that joins two pieces if the result is a piece, highest scores first."""
    ids = {piece.piece: i for i, piece in enumerate(pieces)}
    normal = {piece.piece for piece in pieces if piece.type == _Piece.NORMAL}
    merges = [
        (-piece.score, ids[left], ids[right], left, right)
        for piece in pieces
        if piece.type == _Piece.NORMAL
        for left, right in ((piece.piece[:i], piece.piece[i:]) for i in range(1, len(piece.piece)))
        if left in normal and right in normal
    ]
    return models.BPE(
        ids,
        [(left, right) for *_, left, right in sorted(merges)],
        unk_token=pieces[unknown].piece,
        fuse_unk=True,
        byte_fallback=any(piece.type == _Piece.BYTE for piece in pieces),
        # Merges cannot give such a word.  This also matches a "</s>" between words: only if needed.
        ignore_merges=any(p.type == _Piece.USER_DEFINED and len(p.piece) > 1 for p in pieces),
    )


def _unigram(pieces: list[Any], unknown: int) -> models.Unigram:
    """Makes a unigram model; pieces that must not match text score as one character, so they lose.

    A low score would not do: the library puts unknown characters, as in "</s>", below all scores.
    """
    lowest = min((p.score for p in pieces if p.type == _Piece.NORMAL), default=0.0) + _CHARACTER
    read = (_Piece.NORMAL, _Piece.USER_DEFINED)
    scores = [
        (p.piece, p.score + _CHARACTER * len(p.piece) if p.type in read else lowest) for p in pieces
    ]
    return models.Unigram(scores, unknown, any(piece.type == _Piece.BYTE for piece in pieces))
