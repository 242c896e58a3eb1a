"""Reads and applies Hugging Face's tokenizer.json."""

import itertools
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from configs.errors import UserError, brief, did_you_mean
from configs.json_reader import read_json
from configs.paths import path_of
from configs.spec import spec
from data.sources.text_files import decoded
from data.tokenizers.sentence_piece import processor_of
from data.vocab import Tokenizer, Vocab, read_model

TOKENIZER = "tokenizer.json"
CONFIG = "tokenizer_config.json"
TEMPLATE = "chat_template.jinja"
SPECIAL_TOKENS = "special_tokens_map.json"
GENERATION = "generation_config.json"
_BESIDE = (CONFIG, GENERATION, SPECIAL_TOKENS, TEMPLATE)
_FORMAT = "meshloom tokenizer.json 1"
_BYTE = re.compile("<0x[0-9A-Fa-f]{2}>")
_SENTINEL = re.compile(r"<extra_id_\d+>")
_NO_CHARACTER = "\N{REPLACEMENT CHARACTER}"
_PARAMETERS = {"begin": "bos_token", "end": "eos_token", "pad": "pad_token"}
"""The key of each special token in Hugging Face's files, by parameter."""

_KEPT_BEGIN = "begin is chosen"
"""Key in a bundle, set if TokenizerJson.begin names the same token as the files."""

Files = dict[str, str]


@spec
class TokenizerJson(Tokenizer):
    """Uses a Hugging Face tokenizer, with the same IDs."""

    path: str
    """A folder with tokenizer.json, that file itself, or the vocab.model of a model directory. In
    the same folder, tokenizer_config.json names the special tokens, and generation_config.json
    (eos_token_id) the tokens at which decoding stops."""
    begin: str | None = None
    """The token that a decoder reads before a text, such as "<s>". None: the bos_token of
    tokenizer_config.json, else the one of tokenizer.json, else the token that ends a text. Without
    this setting, `decode` puts it before prompts only if tokenizer.json does."""
    end: str | None = None
    """The token that ends a text, such as "</s>". None: the eos_token of tokenizer_config.json."""
    pad: str | None = None
    """A token without text. None: the pad_token of tokenizer_config.json, if any."""

    package = "tokenizers"

    def given(self) -> Vocab:
        chosen = {key: token for key in _PARAMETERS if (token := getattr(self, key)) is not None}
        return TokenizerJsonVocab(read_bundle(self.path, chosen), self.path)


class TokenizerJsonVocab(Vocab):
    """Maps text to ids and back with a tokenizer.json.

    Special tokens in a text become their ids, as in Hugging Face's library, unless
    tokenizer_config.json sets split_special_tokens.  The code that packs a text adds the special
    tokens around it.
    """

    def __init__(self, model: bytes, name: str = TOKENIZER):
        content = _object(decoded(model, name), name)
        files, special = _parts(content, name)
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(files[TOKENIZER])
        except Exception as error:  # the library raises nothing more specific
            problem = f"is not a tokenizer.json: {brief(str(error))}."
            raise UserError(f"vocab {name}: {problem}") from None
        added = self._tokenizer.get_added_tokens_decoder().items()
        self._hidden = {i for i, x in added if x.special and not _SENTINEL.fullmatch(x.content)}
        # Both would change texts: here, only the length of a row cuts and pads.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        config = _object(files.get(CONFIG, "{}"), f"vocab {name}: {CONFIG}")
        self._tokenizer.encode_special_tokens = config.get("split_special_tokens") is True
        by_id: dict[int, str] = {}  # of tokens that share an id, decoding gives only one
        for token, number in self._tokenizer.get_vocab(with_added_tokens=True).items():
            if (other := by_id.setdefault(number, token)) != token:
                both = " and ".join(sorted(map(repr, (other, token))))
                raise UserError(
                    f"vocab {name}: the tokens {both} have the same id, {number}.  Give each its "
                    "own."
                )
        for each in json.loads(files[TOKENIZER]).get("added_tokens") or ():
            token, number = each["content"], each["id"]
            if (other := by_id.get(number, token)) != token:  # the library changed the id
                problem = f"the added token {token!r} has the same id as {other!r}, {number}"
                raise UserError(f"vocab {name}: {problem}.  Give each its own.")
        ids = {key: self._id(special.get(key), key, name) for key in _PARAMETERS}
        end = ids["end"]
        if end is None:
            raise UserError(
                f"vocab {name}: no token is known to end a text ({CONFIG} in its folder has no "
                f'eos_token).  Set TokenizerJson.end, as in "</s>".{self._known_tokens()}'
            )
        # What tokenizer.json puts before every text, as in Hugging Face's library.
        encoding = self._tokenizer.encode("a")
        before = list(encoding.ids[: [*encoding.special_tokens_mask, 0].index(0)])
        begins = [i for i in (ids["begin"], *before, end) if i is not None]
        generation = _object(files.get(GENERATION, "{}"), f"vocab {name}: {GENERATION}")
        is_chosen = special.get("begin") != _special_tokens(files).get("begin")
        super().__init__(
            model,
            1 + max(by_id),
            begin_id=begins[0],
            end_id=end,
            pad_id=ids["pad"],
            reads_begin=is_chosen or content.get(_KEPT_BEGIN, False) or begins[0] in before,
            stop_ids=tuple(eos_token_ids(generation)),
            files=files,
        )

    def encode(self, lines: Sequence[str]) -> list[np.ndarray]:
        encodings = self._tokenizer.encode_batch_fast(list(lines), add_special_tokens=False)
        return [np.asarray(encoding.ids, self.dtype) for encoding in encodings]

    def encode_marked(self, text: str, spans: Iterable[tuple[int, int]]) -> np.ndarray:
        """Returns the ids of a text; those outside the spans of characters become -1 - id."""
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        starts, ends = np.array(encoding.offsets, np.int64).reshape(-1, 2).T
        is_inside = np.zeros(len(starts), bool)
        for start, end in spans:
            is_inside |= (starts < end) & (ends > start)
        ids = np.array(encoding.ids, np.int32)
        return np.where(is_inside, ids, -1 - ids)

    def _text(self, ids: list[int]) -> str:
        # The library would also hide T5's sentinels, between which the text is.
        shown = [i for i in ids if i not in self._hidden]
        text = self._tokenizer.decode(shown, skip_special_tokens=False)
        if _NO_CHARACTER not in text or '"ByteFallback"' not in self.files[TOKENIZER]:
            return text
        tokens = [self._tokenizer.id_to_token(i) for i in shown]
        return self._tokenizer.decoder.decode([*_mark_lone_bytes(filter(None, tokens))])

    def pieces(self, ids: Iterable[int]) -> list[str]:
        return [self._tokenizer.id_to_token(int(i)) or f"<{i}>" for i in ids]

    def _id(self, token: str | None, key: str, name: str) -> int | None:
        if token is None:
            return None
        number = self._tokenizer.token_to_id(token)
        if number is None:
            near = did_you_mean(token, self._tokenizer.get_vocab())
            raise UserError(
                f"vocab {name}: has no token {token!r} (TokenizerJson.{key}, or {CONFIG}'s "
                f"{_PARAMETERS[key]}).{near}{self._known_tokens()}"
            )
        return number

    def _known_tokens(self) -> str:
        added = self._tokenizer.get_added_tokens_decoder().values()
        special = [token.content for token in added if token.special]
        return f"  Its special tokens: {brief(', '.join(special)) or 'none'}."


def _mark_lone_bytes(tokens: Iterable[str]) -> Iterator[str]:
    """Replaces bytes that are not part of a character.

    Otherwise the decoder of a tokenizer.json loses all byte-encoded characters next to such a byte.
    """
    for are_bytes, group in itertools.groupby(tokens, lambda token: bool(_BYTE.fullmatch(token))):
        if not are_bytes:
            yield from group
            continue
        raw = bytes(int(token[3:5], 16) for token in group)
        for char in raw.decode(errors="surrogateescape"):
            is_lone = "\udc80" <= char <= "\udcff"
            yield from [_NO_CHARACTER] if is_lone else [f"<0x{b:02X}>" for b in char.encode()]


def read_bundle(path: str, chosen: Mapping[str, str]) -> bytes:
    """Joins tokenizer.json and the files next to it into the model of a vocab.

    chosen holds special tokens by parameter, which replace those in the files.
    """
    file = path_of(path).expanduser()
    if file.is_dir():
        file = file / TOKENIZER
    elif not file.exists():
        raise UserError(f"TokenizerJson.path: {path}: no such file or folder.")
    # A folder may have a SentencePiece model instead of the file.
    for other in [file] if file.exists() else sorted(file.parent.glob("*.model")):
        model = read_model(other)
        if not is_bundle(model.lstrip()) and processor_of(model) is not None:
            raise UserError(
                f"TokenizerJson.path: {other} is a SentencePiece model, not a {TOKENIZER}.  "
                f"@SentencePiece() reads it: SentencePiece.model_file = {str(other)!r}."
            )
    try:
        text = decoded(read_model(file), str(file))
        content = _object(text, str(file))
        if not {"format", "model"} & content.keys():
            raise UserError(f"{file}: is not a {TOKENIZER}: it has no model.")
    except UserError as error:
        raise UserError(f"{error}  {how_to_make(file.parent)}") from None
    if "format" in content:  # a bundle: tokenizer.json has no such key
        files, special = _parts(content, str(file))
        is_kept = "begin" not in chosen and content.get(_KEPT_BEGIN, False)
    else:
        beside = {name: file.parent / name for name in _BESIDE}
        kept = {name: decoded(read_model(p), str(p)) for name, p in beside.items() if p.exists()}
        files, special = {TOKENIZER: text, **kept}, _special_tokens(kept, str(file.parent))
        template_text(kept)  # refuses a template that is not text
        is_kept = False
    is_kept |= "begin" in chosen and chosen["begin"] == _special_tokens(files).get("begin")
    flag = {_KEPT_BEGIN: True} if is_kept else {}
    joined = {"format": _FORMAT, "special": {**special, **chosen}, "files": files, **flag}
    return json.dumps(joined, sort_keys=True).encode()


def how_to_make(folder: Path) -> str:
    """Describes how to make a tokenizer.json from another file."""
    return (
        f"Legal: a {TOKENIZER}.  Hugging Face's library converts vocab.txt, vocab.json with "
        "merges.txt, or a tiktoken file named tokenizer.model: "
        f"AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r})."
    )


def eos_token_ids(settings: Mapping[str, Any]) -> list[int]:
    """Returns the ids that end a text in Hugging Face's library, given the settings in a file."""
    ends = settings.get("eos_token_id")
    return [i for i in (ends if isinstance(ends, list) else [ends]) if isinstance(i, int)]


def is_bundle(model: bytes) -> bool:
    """Returns whether a file was made by `read_bundle`, and is not a SentencePiece model."""
    return model.startswith(b"{")


def _parts(content: dict[str, Any], name: str) -> tuple[Files, dict[str, str]]:
    """Returns the files and the special tokens of a bundle."""
    files, special = content.get("files"), content.get("special")
    is_ours = content.get("format") == _FORMAT
    if is_ours and isinstance(files, dict) and isinstance(special, dict) and TOKENIZER in files:
        return files, special
    raise UserError(
        f"vocab {name}: is JSON, but not a vocab of this version.  Name a {TOKENIZER} by "
        "TokenizerJson.path; AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR) writes one."
    )


def _special_tokens(files: Files, folder: str = "") -> dict[str, str]:
    """Returns the special tokens in a tokenizer's files, by parameter."""
    special = {}
    for file in (SPECIAL_TOKENS, CONFIG):  # the last file that names one counts
        settings = _object(files.get(file, "{}"), os.path.join(folder, file))
        for key, name in _PARAMETERS.items():
            token = settings.get(name)
            token = token.get("content") if isinstance(token, dict) else token
            if isinstance(token, str):
                special[key] = token
    return special


def _object(text: str, name: str) -> dict[str, Any]:
    return read_json(text, dict[str, Any], name)


def template_text(files: Mapping[str, str]) -> str | None:
    """Returns the text of the template in a tokenizer's files, if there is one."""
    text = files.get(TEMPLATE) or json.loads(files.get(CONFIG, "{}")).get("chat_template")
    named = text if isinstance(text, list) else [{"name": "default", "template": text}]
    try:
        text = {one["name"]: one["template"] for one in named}.get("default")
        if text is None or isinstance(text, str):
            return text
    except (KeyError, TypeError):
        pass
    raise UserError(
        f"{CONFIG}: chat_template = {brief(repr(text))}.  Legal: a text, or a list of "
        '{"name": "default", "template": a text}.'
    )
