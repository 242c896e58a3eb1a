"""Runs that train adapters: what they save, how they resume, and the model that they are of."""

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from configs.errors import UserError
from layouts.layout import Layout
from layouts.mesh import make_mesh
from models.adapters.lora import Lora
from models.feed_forward.moe.layer import Moe
from tests.toys import WHOLE
from tests.trainer.test_layout_sweep import by_path
from tests.trainer.test_loop import RUN, Recorder, job
from trainer.checkpoints.manager import Checkpoints
from trainer.checkpoints.restore import StatePadding
from trainer.checks import step_flops
from trainer.loop import restore_or_init, train
from trainer.run import Run
from trainer.step import State, train_step_spec

LORA = Lora(rank=3, targets=("attention/w*", "wo"))
SPLIT = Layout(mesh="data:2,model:2", rules="batch:data;d_ff:model", param_rules="d_model:data?")


def adapted(start_from: Path, **changes: Any) -> Run:
    model = dataclasses.replace(RUN.model, **{"adapter": LORA, **changes.pop("model", {})})
    changes = {"keep_last": 9, "start_from": str(start_from), **changes}
    return dataclasses.replace(RUN, model=model, **changes)


def state_of(run: Run, model_dir: Path, layout: Layout = WHOLE) -> State:
    """The state that training in a folder begins with or goes on with."""
    mesh = make_mesh(layout)
    with jax.set_mesh(mesh), Checkpoints(model_dir) as checkpoints:
        padding = StatePadding(train_step_spec(run, layout), mesh)
        return restore_or_init(padding, checkpoints, run)[0]


def arrays(tree: Any) -> dict[str, np.ndarray]:
    return {path: np.asarray(x) for path, x in by_path(tree).items()}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    train(job(folder, dataclasses.replace(RUN, steps=2)))
    return folder


@pytest.fixture(scope="module")
def trained(base: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Recorder]:
    folder, recorder = tmp_path_factory.mktemp("adapters"), Recorder()
    train(job(folder, adapted(base)), [recorder])
    return folder, recorder


def test_checkpoints_have_adapters_alone(trained: tuple[Path, Recorder], base: Path) -> None:
    with Checkpoints(trained[0]) as checkpoints, Checkpoints(base) as of_base:
        saved, weights = checkpoints.describe(5), of_base.describe(2)
    names = {path for path in saved if path.startswith("params/")}
    assert all(path.startswith("params/adapter/decoder/layers_N/") for path in names)
    assert len(names) == 10
    moments = {path for path in saved if path.startswith("opt_state/") and path.count("/") > 3}
    assert len(moments) == 20 and all("adapter" in path for path in moments)
    assert saved.keys() - names - moments >= {"step", "base/step", "base/checksum"}
    sizes = [sum(x.size * x.dtype.itemsize for x in each.values()) for each in (saved, weights)]
    assert sizes[0] < sizes[1] / 2


def test_a_run_resumes_bit_for_bit_and_keeps_its_base(
    trained: tuple[Path, Recorder], base: Path, tmp_path: Path
) -> None:
    run, (folder, recorder) = adapted(base), trained
    first = state_of(run, tmp_path)
    train(job(tmp_path, dataclasses.replace(run, steps=2)))
    again = Recorder()
    train(job(tmp_path, run), [again])
    assert again.losses == {step: recorder.losses[step] for step in (3, 4, 5)}
    assert recorder.losses[5] < recorder.losses[1]
    last, expected = state_of(run, tmp_path), arrays(state_of(run, folder))
    for path, array in arrays(last).items():
        np.testing.assert_array_equal(array, expected[path], err_msg=path)
    of_base = arrays(state_of(dataclasses.replace(RUN, steps=2), base)["params"])
    begin, end = arrays(first["params"]), arrays(last["params"])
    assert begin.keys() == end.keys() > of_base.keys()
    for path, weight in end.items():
        if path in of_base:
            np.testing.assert_array_equal(weight, of_base[path])
            np.testing.assert_array_equal(weight, begin[path])
        else:
            assert path.startswith("adapter/") and (weight != begin[path]).any()


def test_a_layout_changes_no_bit_of_what_identifies_the_base(
    trained: tuple[Path, Recorder], base: Path
) -> None:
    run = adapted(base)
    one, other = (state_of(run, trained[0], layout) for layout in (WHOLE, SPLIT))
    assert arrays(one["base"]) == arrays(other["base"]) and one["base"]["checksum"] != 0


def test_a_base_that_trains_on_is_still_known(
    trained: tuple[Path, Recorder], base: Path, tmp_path: Path
) -> None:
    moved = tmp_path / "moved"
    shutil.copytree(base, moved)
    train(job(moved, dataclasses.replace(RUN, steps=4)))
    state = state_of(adapted(moved), trained[0])
    assert int(state["base"]["step"]) == 2
    shutil.rmtree(moved / "checkpoints" / "2")
    with pytest.raises(UserError, match=r"step 2, whose .* no longer there.  Steps there: 4"):
        state_of(adapted(moved), trained[0])


def test_other_bases_are_refused(
    trained: tuple[Path, Recorder], base: Path, tmp_path: Path
) -> None:
    folder, other = trained[0], tmp_path / "other"
    train(job(other, dataclasses.replace(RUN, steps=2, seed=1)))
    with pytest.raises(UserError, match="step 2: not the weights that the run was trained"):
        state_of(adapted(other), folder)
    with pytest.raises(UserError, match=r"step 2, whose .* no longer there.  Steps there: none"):
        state_of(adapted(tmp_path / "none"), folder)
    with pytest.raises(UserError, match=r"step 5: adapters.  Legal: the run that they start from"):
        state_of(adapted(folder), tmp_path / "new")
    with pytest.raises(UserError, match=r"there is no decoder/layers_N/mlp/wg_DF"):
        gated = dataclasses.replace(RUN.model.feed_forward, gated=True)
        state_of(adapted(base, model={"feed_forward": gated}), tmp_path / "new")
    with pytest.raises(
        UserError, match=r"mlp/router_DE: there is no decoder/layers_N/mlp/router_DE"
    ):
        state_of(adapted(base, model={"feed_forward": Moe(experts=4)}), tmp_path / "new")
    with pytest.raises(UserError, match=r"Transformer.adapter: .*Set Run.start_from"):
        dataclasses.replace(adapted(base), start_from=None)


def test_flops_count_no_gradients_of_frozen_weights(base: Path) -> None:
    """Backward, a frozen weight costs what it costs forward; adapters and attention cost twice."""
    thin, thick = (
        step_flops(adapted(base, model={"adapter": dataclasses.replace(LORA, rank=rank)}))
        for rank in (1, 2)
    )
    model = RUN.model.model(WHOLE)
    products = {p: i for p, i in model.weights().items() if i.reads and p != "positions_LD"}
    weights = sum(np.prod(info.shape) for info in products.values())
    tokens = RUN.batch_sequences * RUN.task.row_lengths["length"]
    assert step_flops(RUN) - (2 * thin - thick) == 2 * tokens * weights
