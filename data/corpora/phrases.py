"""Makes a parallel corpus without limit: things drawn by a seed and said in two languages.

Names, dates, times, numbers and lists of them, in the words of CLDR's locale data.
"""

import functools
import hashlib
import importlib.metadata
import re
from pathlib import Path

from babel.core import get_global

from configs.errors import UserError, did_you_mean
from data.corpora.phrase_kinds import Draw, sentence

LANGUAGES = tuple(re.findall(r"\w+", "cs da de el es fi fr hu id it nb nl pl pt ro ru sv tr uk"))
"""Each may be source or target; so may "en"."""


@functools.lru_cache(maxsize=32)  # it is read for each vocab and split, and takes 4 s to make
def corpus(
    language: str, target: str, seed: int, train: int, held_out: int
) -> dict[str, list[tuple[str, str]]]:
    """Returns pairs (source, target) for each split; no source occurs twice, in one or in two.

    A larger `train` only adds pairs, all to train.
    """
    _check(language, target)
    sizes = {"train": train, "validation": held_out, "test": held_out}
    splits: dict[str, list[tuple[str, str]]] = {split: [] for split in sizes}
    draw = Draw(language, target, seed)
    sources: set[str] = set()
    while any(len(splits[split]) < count for split, count in sizes.items()):
        meaning = sentence(draw)
        source = meaning(language)
        split = split_of(source)
        if source not in sources and len(splits[split]) < sizes[split]:
            sources.add(source)
            splits[split].append((source, meaning(target)))
    return splits


def split_of(source: str) -> str:
    """Assigns a source sentence to a split: 4 of 100 to validation, 4 to test."""
    place = int.from_bytes(hashlib.sha256(source.encode()).digest()[:8], "big") % 100
    return "validation" if place < 4 else "test" if place < 8 else "train"


def versions() -> dict[str, str]:
    """Names what the text depends on: the libraries, their data and the rules that draw from it."""
    files = ("phrases.py", "phrase_kinds.py", "phrase_words.py")
    rules = b"".join(Path(__file__).with_name(name).read_bytes() for name in files)
    return {
        "babel": importlib.metadata.version("babel"),
        "cldr": str(get_global("cldr")["version"]),
        "rules": hashlib.sha256(rules).hexdigest()[:16],
    }


def _check(language: str, target: str) -> None:
    legal = sorted((*LANGUAGES, "en"))
    for name in (language, target):
        if name not in legal:
            raise UserError(
                f"language {name!r}: has no phrases.  Legal: {', '.join(legal)}."
                + did_you_mean(name, legal)
            )
    if language == target:
        raise UserError(f"phrases from {language!r} to {target!r}: name two different languages.")
