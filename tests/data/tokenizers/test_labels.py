from pathlib import Path

import pytest

from configs.errors import UserError
from data.tokenizers.labels import FORMAT, LabelVocab
from data.vocabs import load_vocab


@pytest.mark.parametrize(("count", "legal"), [(3, "l00, l01, l02."), (42, "l38, l39 and 2 more.")])
def test_a_label_that_is_not_known_is_an_error_with_the_first_of_those_that_are(
    count: int, legal: str
) -> None:
    vocab = LabelVocab((FORMAT + "\n".join(f"l{i:02}" for i in range(count))).encode())
    assert [ids.tolist() for ids in vocab.encode(["l02", "l00"])] == [[2], [0]]
    with pytest.raises(UserError, match="label 'owl': it does not occur in the training") as error:
        vocab.encode(["l00", "owl"])
    assert str(error.value).endswith(legal)


def test_a_damaged_vocab_is_refused(tmp_path: Path) -> None:
    (tmp_path / "vocab.model").write_bytes(FORMAT.encode() + b"cat\ndo\xe7")
    with pytest.raises(UserError, match=r"vocab .*vocab\.model: byte 25 is 0xe7, not UTF-8"):
        load_vocab(tmp_path / "vocab.model")
