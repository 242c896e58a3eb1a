"""An error is traced to the statement that names tensors, in the forward pass if need be."""

import runpy
from pathlib import Path

import jax.numpy as jnp
import pytest

from layouts.layout import Layout
from layouts.lint.recorder import Statement, find_statement, named_tensors


def fails(x_BLD: object) -> None:
    y_BL = jnp.zeros(3).reshape(2)
    assert y_BL is x_BLD


def error() -> Exception:
    with pytest.raises(TypeError) as caught:
        fails(None)
    return caught.value


def test_the_statement_is_the_innermost_that_names_tensors() -> None:
    computed = find_statement(error())
    assert computed.line.startswith("tests/layouts/lint/test_statements.py:")
    assert (computed.text, computed.tensors) == ("y_BL = jnp.zeros(3).reshape(2)", ("y_BL",))


def test_a_cause_is_looked_at_where_the_error_names_no_tensor() -> None:
    def outer() -> None:
        raise ValueError from error()

    with pytest.raises(ValueError) as caught:
        outer()
    assert "test_statements.py" in find_statement(caught.value).line


def test_a_statement_of_a_user_has_the_path_of_its_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("import json\n\n\ndef fails():\n    json.loads('')\n")
    with pytest.raises(ValueError) as caught:
        runpy.run_path(str(file))["fails"]()
    assert find_statement(caught.value) == Statement(f"{file}:5", "json.loads('')", ())


def test_only_names_that_end_in_letters_are_tensors() -> None:
    assert named_tensors("y_BL1 = custom_vjp(x_GSe, is_tied, self.wi_DF)") == (
        "y_BL1", "x_GSe", "wi_DF",
    )  # fmt: skip


def test_only_axes_that_are_split_are_described() -> None:
    layout = Layout(mesh="data:2,model:4", rules="batch:data;batch:model;length:model?")
    statement = Statement("models/mine.py:1", "", ("x_BL1", "w_DF", "y_bL"))
    assert statement.describe(layout) == (
        "x_BL1 has batch over data and model; y_bL has length over model.\n"
    )
    assert statement.letters >= {"B", "L", "D", "F"}
