"""Tasks: what a name and a length may be."""

from pathlib import Path

import pytest

from configs.errors import UserError
from configs.load import load
from data.source import Docstrings
from data.task import Task
from data.vocab import SentencePiece

TASKS = Path(__file__).parents[2] / "configs" / "tasks"


@pytest.mark.parametrize("name", ["", "../x", ".hidden", "a/b", "a b"])
def test_a_name_is_a_folder_name(name):
    with pytest.raises(UserError, match=r"Task.name = .*it names a folder of data_dir"):
        Task(name=name, source=Docstrings(), vocab=SentencePiece(), length=8)


def test_a_row_has_at_least_two_places():
    with pytest.raises(UserError, match=r"length = 1: legal: .* at least 2 and of at most 65536"):
        Task(name="x", source=Docstrings(), vocab=SentencePiece(), length=1)


@pytest.mark.parametrize("file", sorted(TASKS.glob("*.gin")), ids=lambda file: file.stem)
def test_every_task_file_makes_a_task_of_its_name(file):
    needed = ["TextFiles.train='my/*.txt'"] if file.stem == "text" else []
    assert load([str(file)], needed).make(Task).name == file.stem
