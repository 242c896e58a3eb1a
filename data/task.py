"""A task: which text, which vocab, and how its examples lie in rows."""

import re
from typing import Annotated

from pydantic import Field

from configs.errors import UserError
from configs.spec import spec
from data.source import Source
from data.vocab import SentencePiece


@spec
class Task:
    """What `prepare` makes rows from."""

    name: str
    """Names the cache: a folder of data_dir."""
    source: Source
    vocab: SentencePiece
    length: Annotated[int, Field(ge=2, le=65_536)]
    """Tokens a row."""
    packs: bool = True
    """Several examples share a row; otherwise each has its own."""
    word_list: str | None = None
    """A file of words, one a line; other words are read as <UNK>, which is LM1B's rule."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", self.name):
            raise UserError(
                f"Task.name = {self.name!r}: it names a folder of data_dir.  "
                "Legal: letters, digits, '_', '-' and '.', with no '.' or '-' in front."
            )
