"""Tasks: what a name and a length may be."""

import pytest

from configs.errors import UserError
from data.source import Docstrings
from data.task import Task
from data.vocab import SentencePiece


@pytest.mark.parametrize("name", ["", "../x", ".hidden", "a/b", "a b"])
def test_a_name_is_a_folder_name(name):
    with pytest.raises(UserError, match=r"Task.name = .*it names a folder of data_dir"):
        Task(name=name, source=Docstrings(), vocab=SentencePiece(), length=8)


def test_a_row_has_at_least_two_places():
    with pytest.raises(UserError, match=r"length = 1: legal: .* at least 2 and of at most 65536"):
        Task(name="x", source=Docstrings(), vocab=SentencePiece(), length=1)
