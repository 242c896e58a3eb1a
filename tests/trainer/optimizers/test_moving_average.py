"""The moving average of weights: its numbers, where it is, and what it costs."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from configs.errors import UserError
from layouts.mesh import make_mesh
from models.adapters.lora import Lora
from tests.toys import FLOAT64, ROUND_OFF
from tests.trainer.test_adapters import SPLIT, arrays, state_of
from tests.trainer.test_loop import RUN, Recorder, job
from trainer.checkpoints.manager import Checkpoints
from trainer.loop import train
from trainer.memory import shard_bytes
from trainer.optimizers.chain import keep_average
from trainer.optimizers.spikes import SkipSpikes
from trainer.resume.changes import check_changes
from trainer.step import abstract_state, train_step_spec

DECAY = 0.8
EMA = dataclasses.replace(RUN, ema=DECAY, checkpoint_every=1, keep_last=9)


def averaged(weights: list[np.ndarray], start: np.ndarray) -> np.ndarray:
    average = start.astype(np.float64)
    for update, weight in enumerate(weights):
        decay = min(DECAY, update / (10 + update))
        average = decay * average + (1 - decay) * weight.astype(np.float64)
    return average


def saved(model_dir: Path, step: int, root: str) -> dict[str, np.ndarray]:
    with Checkpoints(model_dir) as checkpoints:
        shapes = {
            path: array.shape
            for path, array in checkpoints.describe(step).items()
            if path.startswith(f"{root}/")
        }
        return {p.removeprefix(f"{root}/"): x for p, x in checkpoints.arrays(step, shapes)}


# XLA may leave out that a new weight is rounded to bfloat16 where a float32 follows from it.
@pytest.mark.parametrize(("dtype", "rtol"), [("float32", 1e-5), ("bfloat16", 2.0**-8)])
def test_the_average_is_that_of_numpy(dtype: str, rtol: float) -> None:
    rng = np.random.default_rng(0)
    gradients = [rng.normal(size=7) for _ in range(50)]
    transform = keep_average(optax.sgd(0.1), DECAY)
    update = jax.jit(transform.update)
    params = {"w_D": jnp.asarray(rng.normal(size=7), dtype)}
    state, first, weights = transform.init(params), np.asarray(params["w_D"]), []
    for gradient_D in gradients:
        changes, state = update({"w_D": jnp.asarray(gradient_D, dtype)}, state, params)
        params = optax.apply_updates(params, changes)
        weights.append(np.asarray(params["w_D"]))
    assert state.average["w_D"].dtype == jnp.float32
    np.testing.assert_allclose(
        state.average["w_D"], averaged(weights, 99 + first), rtol=rtol
    )  # the first update forgets where the run began


def test_a_run_keeps_the_average_and_resumes_it_bit_for_bit(tmp_path: Path) -> None:
    run = dataclasses.replace(EMA, microbatches=2, skip_spikes=SkipSpikes())
    straight, resumed = tmp_path / "a", tmp_path / "b"
    plain, with_average = Recorder(), Recorder()
    train(job(tmp_path / "plain", dataclasses.replace(run, ema=None)), [plain])
    train(job(straight, run), [with_average])
    assert plain.losses == with_average.losses
    for steps in (3, 5):
        train(job(resumed, dataclasses.replace(run, steps=steps)))
    states = [arrays(state_of(run, folder)) for folder in (straight, resumed)]
    for path, array in states[0].items():
        np.testing.assert_array_equal(array, states[1][path], err_msg=path)
    root = "opt_state/average"
    weights = [saved(straight, step, "params") for step in range(1, 6)]
    for path, average in saved(straight, 5, root).items():
        expected = averaged([step[path] for step in weights], weights[0][path])
        np.testing.assert_allclose(average, expected, rtol=1e-5, atol=1e-7)
        assert (average != weights[-1][path]).any()


@pytest.mark.long
@pytest.mark.usefixtures("float64")
def test_no_layout_changes_the_average_and_it_is_split_as_the_weights(tmp_path: Path) -> None:
    run = dataclasses.replace(EMA, model=dataclasses.replace(RUN.model, precision=FLOAT64))
    split = dataclasses.replace(job(tmp_path / "split", run), layout=SPLIT, mesh=make_mesh(SPLIT))
    train(job(tmp_path / "whole", run))
    train(split)
    one, other = (state_of(run, tmp_path / name, SPLIT) for name in ("whole", "split"))
    for path, average in arrays(one["opt_state"].average).items():
        np.testing.assert_allclose(
            arrays(other["opt_state"].average)[path], average, rtol=ROUND_OFF, atol=ROUND_OFF
        )
    placed = jax.tree.map(lambda x: x.sharding, (other["params"], other["opt_state"].average))
    assert placed[0] == placed[1]


def test_a_plan_counts_the_average() -> None:
    state, with_average = (
        abstract_state(train_step_spec(run, SPLIT), make_mesh(SPLIT).abstract_mesh)
        for run in (RUN, EMA)
    )
    more = shard_bytes(with_average["opt_state"]) - shard_bytes(state["opt_state"])
    assert more == shard_bytes(state["params"]) + 4  # and a count


@pytest.mark.long
def test_the_average_of_adapters(tmp_path: Path) -> None:
    train(job(tmp_path / "base", dataclasses.replace(RUN, steps=1)))
    model = dataclasses.replace(RUN.model, adapter=Lora(rank=3))
    run = dataclasses.replace(EMA, model=model, start_from=str(tmp_path / "base"), steps=2)
    train(job(tmp_path / "run", run))
    average, weights = (
        saved(tmp_path / "run", 2, root) for root in ("opt_state/average", "params")
    )
    assert average.keys() == weights.keys() and all("adapter" in path for path in average)


def test_the_decay_may_change_with_an_override_and_the_average_may_not_come_or_go() -> None:
    slower, without = (dataclasses.replace(EMA, ema=decay) for decay in (0.9, None))
    with pytest.raises(UserError, match=r"Run\.ema: 0.8 there, 0.9 now: legal with --override"):
        check_changes("run", EMA, slower, override=False)
    assert [change.name for change in check_changes("run", EMA, slower, override=True)]
    with pytest.raises(UserError, match=r"Run\.ema: 0.8 there, None now: no longer the same"):
        check_changes("run", EMA, without, override=True)
