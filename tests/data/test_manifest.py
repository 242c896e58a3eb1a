"""A manifest that was changed and signed again is refused where its types are wrong."""

from pathlib import Path
from typing import Any

import pytest

from configs.errors import UserError
from data import manifest

COUNTS = {"lines": 3, "words": 9, "bytes": 40, "tokens": 12, "rows": 1}
SPLIT = {**COUNTS, "chunk_sizes": [[3, 1, 1]], "files": [["text.txt", 3]]}
WHOLE: dict[str, Any] = {
    "format": manifest.FORMAT, "settings": {}, "content_hash": "a", "text_hash": "b",
    "vocab_hash": "c", "splits": {"train": SPLIT}, "fingerprint": None,
    "file_bytes": {"train.tokens.npy": 9}, "versions": {},
}  # fmt: skip


def test_a_whole_manifest_is_read(tmp_path: Path) -> None:
    manifest.write(tmp_path, WHOLE)
    assert manifest.load(tmp_path) == WHOLE


@pytest.mark.parametrize(
    "splits",
    [{}, {"train": {**SPLIT, "files": [5]}}, {"train": {**SPLIT, "chunk_sizes": [[None]]}}],
)
def test_wrong_types_are_refused(tmp_path: Path, splits: dict[str, Any]) -> None:
    manifest.write(tmp_path, {**WHOLE, "splits": splits})
    with pytest.raises(UserError, match=r"is not a complete cache \(manifest\.json: splits"):
        manifest.load(tmp_path)
