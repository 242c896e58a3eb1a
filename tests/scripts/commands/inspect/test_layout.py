"""The tensors that `meshloom inspect layout` names, and its legend."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from configs.errors import UserError
from configs.load import load
from layouts.axes import alphabet
from layouts.layout import Layout
from layouts.lint.recorder import record
from models.transformer import Transformer
from scripts.commands.inspect.flags import InspectLayoutFlags
from scripts.commands.inspect.layout import (
    layers_by_axes,
    legend,
    model_of,
    planned_sizes,
    sharding_text,
    tensors_by_kind,
)
from scripts.devices import DeviceFlags
from scripts.texts import shortened


def trace(layout: Layout) -> Any:
    wi_DF = layout.random(jax.random.normal, jax.random.key(0), "DF", (10, 14), stored=True)
    x_BD = layout.iota("BD", (4, 10), "D").astype(jnp.float32)
    h_BF = layout.einsum("BD,DF->BF", x_BD, wi_DF)
    return {"mlp": {"wi_DF": wi_DF}}, jnp.sum(-h_BF, axis=-1)


def test_tensors_are_named_as_the_model_names_them() -> None:
    kinds = tensors_by_kind(record(lambda layout: trace(layout)[0]))
    assert kinds[("DF", True)] == ["mlp/wi_DF"]
    assert kinds[("BD", False)] == ["x_BD"]
    assert kinds[("BF", False)] == ["h_BF"]
    [line] = kinds[("B", False)]
    assert line.startswith("tests/scripts/commands/inspect/test_layout.py:")


def test_what_a_layer_takes_of_a_stack_is_named_by_the_weight() -> None:
    def trace_layers(layout: Layout) -> Any:
        shape = (3, 10, 14)
        wi_NDF = layout.random(jax.random.normal, jax.random.key(0), "NDF", shape, stored=True)
        x_BD = layout.iota("BD", (4, 10), "D").astype(jnp.float32)
        for layer in layout.unstack({"wi_DF": wi_NDF}):
            layout.einsum("BD,DF->BF", x_BD, layer["wi_DF"])
        return {"layers_N": {"wi_DF": wi_NDF}}

    kinds = tensors_by_kind(record(trace_layers))
    stored = {axes: names for (axes, is_stored), names in kinds.items() if is_stored}
    assert stored.pop("NDF") == ["layers_N/wi_DF"]
    assert stored and {*map(tuple, stored.values())} == {("a layer of layers_N/wi_DF",)}


def test_the_legend_explains_the_letters_of_the_table() -> None:
    rows = legend(alphabet(), ["DF", "B_F"])
    assert [row[:2] for row in rows] == [("B", "batch"), ("D", "d_model"), ("F", "d_ff"), ("_", "")]
    assert all(meaning for *_, meaning in rows)
    rows = legend(alphabet(), ["BlD"])
    assert [name for _, name, _ in rows] == ["batch", "length", "d_model", ""]
    assert rows[-1][0] == "lower case"


def test_a_mesh_fits_the_devices_that_are_simulated() -> None:
    layout = Layout(mesh="data:16")
    assert planned_sizes(layout, InspectLayoutFlags()) == {"data": 16}
    here = InspectLayoutFlags(devices=DeviceFlags(simulate_devices=8))
    with pytest.raises(UserError, match="needs 16 devices, found 8"):
        planned_sizes(layout, here)


def test_a_kind_shows_its_first_tensors() -> None:
    assert shortened(["a", "b"], 4) == "a, b"
    assert shortened([*"abcdefg"], 4) == "a, b, c, d, 3 more"


def test_scopes_of_the_model_and_of_the_task_count() -> None:
    files = ["configs/models/tiny.gin", "configs/tasks/text.gin"]
    params = [
        "Run.task = @mine/Task()", "mine/Task.vocab = @SentencePiece()",
        "mine/SentencePiece.size = 700", "Run.model = @big/Transformer()",
        "big/Transformer.d_model = 256",
    ]  # fmt: skip
    assert model_of(load(files, params[:1])).vocab_rows == 8192
    model = model_of(load(files, params))
    assert isinstance(model, Transformer)
    assert (model.vocab_rows, model.d_model) == (768, 256)


def test_layers_and_shardings_have_the_words_of_a_layout_file() -> None:
    place = jax.P(None, "data", "model")
    assert sharding_text(("layers", "d_model", "d_ff"), place) == "d_model:data;d_ff:model"
    assert layers_by_axes(["decoder/layers_N/mlp/wi_DF", "decoder/norm/scale_D"]) == {
        "DF": ["a layer of decoder/layers_N/mlp/wi_DF"], "D": ["decoder/norm/scale_D"],
    }  # fmt: skip
