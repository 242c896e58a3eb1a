"""Gradients under shipped layouts are those of a CPU, and wrong ones are reported."""

from collections.abc import Iterator

import jax
import pytest

from configs.errors import UserError
from layouts.layout import Layout
from layouts.mesh import make_mesh
from layouts.shards import num_shards
from tests.toys import optax_promotion
from trainer import device_check
from trainer.device_check import Comparison, compare_with_cpu, tiny_models
from trainer.feed import BatchSharding
from trainer.step import abstract_params

SHARDED = Layout(mesh="data:2,model:2", rules="batch:data;heads:model;d_ff:model;vocab:model")
FULLY = Layout(mesh="data:4", rules="batch:data", param_rules="d_model:data")
PIPELINE = Layout(mesh="pipe:2", rules="layers:pipe", pipeline_repeats=2)


@pytest.fixture(autouse=True)
def promotion() -> Iterator[None]:
    with optax_promotion():
        yield


def only(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compares one of the models: each compiles for seconds."""

    def chosen(*arguments: object) -> Iterator[object]:
        return (each for each in tiny_models(*arguments) if each[0] == name)

    monkeypatch.setattr(device_check, "tiny_models", chosen)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("layout", "model"), [(SHARDED, "experts"), (FULLY, "encoder-decoder"), (PIPELINE, "dense")]
)
def test_layouts_give_the_gradients_of_a_cpu(
    layout: Layout, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    only(model, monkeypatch)
    results = list(compare_with_cpu(layout))
    count = make_mesh(layout).size
    wheres = [f"{count} devices", f"{count} devices, 4 microbatches"]
    assert [result.where for result in results] == wheres
    assert all(result.is_equal and result.difference < 1e-5 for result in results), results


def test_a_wrong_gradient_is_reported_with_its_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    only("dense", monkeypatch)
    right = device_check.gradients

    def wrong(*arguments: object) -> object:
        gradients, (*_, microbatches) = right(*arguments), arguments
        if microbatches == 4:
            gradients["embed_VD"] = gradients["embed_VD"] * 1.5
        return gradients

    monkeypatch.setattr(device_check, "gradients", wrong)
    once, several = compare_with_cpu(Layout(mesh="data:2", rules="batch:data"))
    assert once.is_equal and not several.is_equal
    assert several.weight == "embed_VD" and several.difference == pytest.approx(0.5, rel=1e-3)


def test_a_rule_of_an_unknown_mesh_axis_is_refused() -> None:
    with pytest.raises(UserError, match=r"rule batch:model: no such mesh axis: model\."):
        next(compare_with_cpu(Layout(mesh="data:2", rules="batch:model")))


def test_no_number_and_a_refusal_are_not_equal() -> None:
    assert not Comparison("dense", "all devices", float("nan")).is_equal
    assert not Comparison("dense", "all devices", refusal="no").is_equal


@pytest.mark.parametrize("layout", [SHARDED, FULLY, PIPELINE], ids=lambda layout: layout.mesh)
def test_the_layout_divides_every_size(layout: Layout) -> None:
    mesh = make_mesh(layout)
    for _, spec, batch in tiny_models(layout, mesh):
        rows = len(batch["targets_BL"]) // device_check.MICROBATCHES
        BatchSharding(layout, mesh, rows).host_rows()  # raises where they do not divide
        for weight in jax.tree.leaves(abstract_params(spec.model(layout), mesh)):
            weight.sharding.shard_shape(weight.shape)  # the same
        with jax.set_mesh(mesh):
            sizes = {"V": spec.vocab, "F": spec.d_ff, "J": spec.kv_heads, "N": spec.layers}
            for letter, size in sizes.items():
                assert size % num_shards(layout.place(letter)[0]) == 0, letter
