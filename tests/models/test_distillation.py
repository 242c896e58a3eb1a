"""A model that learns the predictions of another one, under every kind of layout."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from layouts.layout import Layout
from layouts.mesh import make_mesh
from models.attention.multi_head import MultiHead
from models.distillation import TEACHER, DistilledModel
from models.feed_forward.moe.layer import Moe
from models.feed_forward.moe.routing import TopK
from models.loss import Criterion
from models.transformer import Transformer
from tests.toys import FLOAT64, ROUND_OFF, SPLITTABLE, WHOLE, packed_rows
from tests.trainer.conftest import optax_types  # noqa: F401
from tests.trainer.test_layout_sweep import by_path, first_state
from trainer.checkpoints.restore import StatePadding
from trainer.feed import BatchSharding
from trainer.optimizers.adamw import AdamW
from trainer.step import TrainStepSpec, add_microbatches

LENGTH = 27
STUDENT = dataclasses.replace(
    SPLITTABLE, vocab=62, layers=2, scan=True, precision=FLOAT64, loss_chunks=3
)
OTHER = dataclasses.replace(
    STUDENT, layers=1, d_model=24, heads=4, d_ff=32, dropout=0.0, attention=MultiHead(),
    feed_forward=Moe(experts=4),
)  # fmt: skip
LAYOUTS = {
    "fsdp": Layout(mesh="data:4", rules="batch:data", param_rules="d_model:data"),
    "uneven vocabulary": Layout(mesh="data:2,model:4", rules="batch:data;vocab:model+;d_ff:model"),
    "stages": Layout(mesh="pipe:2,data:2,x:2", rules="layers:pipe;batch:data;length:x+"),
}
CRITERION = Criterion(teacher_weight=0.4, temperature=2.0)

pytestmark = pytest.mark.usefixtures("float64")


def gradients(
    layout: Layout,
    teacher: Transformer,
    criterion: Criterion = CRITERION,
    *,
    shared: bool = False,
    rows: int = 8,
) -> tuple[float, dict[str, np.ndarray]]:
    """Returns the objective of a batch and its gradients, from the same weights everywhere."""
    model = DistilledModel(STUDENT, layout, teacher)
    program, mesh = (
        TrainStepSpec(model, AdamW(), criterion, 9, 5, microbatches=2),
        make_mesh(layout),
    )
    padding = StatePadding(program, mesh)
    params = first_state(program.without_padding(), mesh)["params"]
    if shared:
        params[TEACHER] = {name: tree for name, tree in params.items() if name != TEACHER}
    packed = packed_rows(([[9, 12], [24], [5, 6, 7], [20]] * 2)[:rows], LENGTH, 62)
    with jax.set_mesh(mesh):
        batch = BatchSharding(layout, mesh, rows, 2).to_global_arrays(packed)
        computed, sums = jax.jit(functools.partial(add_microbatches, program))(
            padding.pad({"params": params})["params"], batch, jax.random.key(7)
        )
        computed = padding.unpad({"params": computed})["params"]
    return float(sums.objective), by_path(jax.device_get(computed))


@functools.cache
def expected() -> tuple[float, dict[str, np.ndarray]]:
    return gradients(WHOLE, OTHER)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", LAYOUTS)
def test_no_layout_changes_what_a_student_learns(name: str) -> None:
    (objective, computed), (expected_objective, of_one_device) = (
        gradients(LAYOUTS[name], OTHER), expected()
    )  # fmt: skip
    assert objective == pytest.approx(expected_objective, rel=ROUND_OFF)
    assert computed.keys() == of_one_device.keys() and not any("teacher" in x for x in computed)
    for path, gradient in of_one_device.items():
        np.testing.assert_allclose(computed[path], gradient, atol=ROUND_OFF, rtol=0, err_msg=path)


@pytest.mark.few(1)
@pytest.mark.parametrize(("rows", "devices", "group_tokens"), [(8, 8, 2 * LENGTH), (6, 2, 12)])
def test_the_groups_of_a_teacher_pad_the_rows_of_both(
    rows: int, devices: int, group_tokens: int
) -> None:
    """Two rows are a group, and a device has one of four; or three of the tokens of three rows."""
    experts = Moe(experts=4, router=TopK(k=1), group_tokens=group_tokens)
    teacher = dataclasses.replace(OTHER, feed_forward=experts)
    expected, of_one_device = gradients(WHOLE, teacher, rows=rows)
    layout = Layout(mesh=f"data:{devices}", rules="batch:data+")
    objective, computed = gradients(layout, teacher, rows=rows)
    assert objective == pytest.approx(expected, rel=ROUND_OFF)
    for path, gradient in of_one_device.items():
        np.testing.assert_allclose(computed[path], gradient, atol=ROUND_OFF, rtol=0, err_msg=path)


def test_a_student_that_predicts_what_its_teacher_does_has_nothing_to_learn() -> None:
    still = dataclasses.replace(STUDENT, dropout=0.0, attention=MultiHead())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.models.test_distillation.STUDENT", still)
        alone = dataclasses.replace(CRITERION, teacher_weight=1.0)
        objective, computed = gradients(WHOLE, still, alone, shared=True)
    assert abs(objective) < 1e-9 and max(abs(x).max() for x in computed.values()) < 1e-9
    assert expected()[0] > 1
