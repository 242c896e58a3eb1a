"""The small files of a model directory."""

import types
from pathlib import Path
from typing import Any

import pytest

from configs.errors import UserError
from layouts.layout import Layout
from tests.trainer.planning.runs import TASK
from trainer.model_dir import ModelDir, starting_vocabs
from trainer.resume.history import Start, record_start


def prepared(content_hash: str, rows_hash: str | None = None) -> Any:
    return types.SimpleNamespace(hashes=lambda _: ([content_hash], rows_hash))


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    directory = ModelDir(tmp_path / "none")
    assert not directory.has_run() and directory.layout is None and directory.record is None
    with pytest.raises(UserError, match=r"none: no trained model there \(config.gin is missing\)"):
        directory.load()
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match="`meshloom import hf` makes one from a folder"):
        ModelDir(tmp_path).load()
    with pytest.raises(UserError, match=r"Run.start_from = '.*none': no trained model there"):
        starting_vocabs({"Run.start_from": str(tmp_path / "none")}, TASK)


def test_the_last_layout_is_kept(tmp_path: Path) -> None:
    directory = ModelDir(tmp_path)
    for rules in ("batch:data", "batch:data;d_ff:model"):
        layout = Layout(mesh="data:2,model:4", rules=rules)
        directory.save_layout(layout)
        assert directory.layout == layout


def test_a_run_continues_only_on_its_text(tmp_path: Path) -> None:
    directory = ModelDir(tmp_path)
    directory.check_text(prepared("any"), TASK)
    record_start(tmp_path, Start(0, "2026-01-01", content_hash="abc"))
    directory.check_text(prepared("abc"), TASK)
    with pytest.raises(UserError, match=r"other text of task toy \(hash abc, now abd\)"):
        directory.check_text(prepared("abd"), TASK)


def test_a_run_continues_only_on_its_rows(tmp_path: Path) -> None:
    directory = ModelDir(tmp_path)
    record_start(tmp_path, Start(0, "2026-01-01", content_hash="abc", rows_hash="1f"))
    directory.check_text(prepared("abc", rows_hash="1f"), TASK)
    with pytest.raises(UserError, match=r"other rows of task toy \(hash 1f, now 2e\)"):
        directory.check_text(prepared("abc", rows_hash="2e"), TASK)


def test_a_run_continues_only_in_its_order(tmp_path: Path) -> None:
    """The first version wrote down none."""
    record_start(tmp_path, Start(0, "2026-01-01", content_hash="abc"))
    directory = ModelDir(tmp_path)
    directory.check_text(prepared("abc"), TASK)
    line = '{"step": 0, "time": "2026-01-01", "content_hash": "abc"}\n'
    (tmp_path / "history.jsonl").write_text(line)
    with pytest.raises(UserError, match=r"in another order \(version 1, now 2\)"):
        directory.check_text(prepared("abc"), TASK)
