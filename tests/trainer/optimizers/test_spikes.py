"""Spikes: what is skipped leaves no trace, and all else is as without."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from configs.errors import RunError, UserError
from layouts.layout import Layout
from layouts.mesh import make_mesh
from models.feed_forward.moe.layer import Moe
from models.feed_forward.moe.routing import SigmoidTopK
from models.loss import Criterion
from tests.toys import FLOAT64, ROUND_OFF, TOY, WHOLE, packed_rows
from tests.trainer.bigram import VOCAB, Bigram, text_rows
from tests.trainer.test_adapters import SPLIT, arrays, state_of
from tests.trainer.test_loop import RUN, Recorder, job
from trainer.feed import BatchSharding
from trainer.loop import train
from trainer.optimizers.adamw import AdamW
from trainer.optimizers.schedules import Constant, Cosine
from trainer.optimizers.spikes import FIRST_STEPS, SkipSpikes
from trainer.resume.changes import check_changes
from trainer.run import Run
from trainer.step import State, TrainStepSpec, abstract_state, init_state, train_step

SPIKE = FIRST_STEPS + 3
STEPS = SPIKE + 5
MARK = VOCAB - 1  # a token whose embedding is large, in one batch alone
ADAMW = AdamW(schedule=Cosine(peak=0.01, warmup_steps=2))
# So tight that it skips ordinary steps of a toy.
TIGHT = dataclasses.replace(RUN, skip_spikes=SkipSpikes(factor=0.1, limit=99), steps=STEPS,
                            checkpoint_every=9, evaluate_every=None)  # fmt: skip


def numpy_decisions(values: np.ndarray, factor: float) -> tuple[list[bool], np.ndarray]:
    """Which of some (loss, gradient norm) are spikes; the bounds that hold at each of them.

    The weights of the moving statistics are written out.
    """
    entered: list[list[float]] = [[], []]
    decisions, all_bounds = [], []
    for pair in values:
        bounds = []
        for entries in entered:
            weights = np.ones(0)
            for count in range(len(entries)):
                share = max(0.01, 1 / (count + 1))
                weights = np.append(weights * (1 - share), share)
            mean = (weights * entries).sum()
            deviation = np.sqrt((weights * (entries - mean) ** 2).sum())
            bound = mean + factor * max(deviation, 0.01 * abs(mean))
            bounds.append(bound if len(entries) >= FIRST_STEPS else np.inf)
        spikes = [
            not (np.isfinite(x) and x <= bound) for x, bound in zip(pair, bounds, strict=True)
        ]
        for entries, x, spike, bound in zip(entered, pair, spikes, bounds, strict=True):
            if not spike or np.isfinite(bound):
                entries.append(bound if spike else x)
        decisions.append(any(spikes))
        all_bounds.append(bounds)
    return decisions, np.array(all_bounds)


@pytest.mark.usefixtures("float64")
def test_bounds_and_decisions_are_those_of_numpy() -> None:
    rng, spec = np.random.default_rng(0), SkipSpikes(factor=4.0)
    values = np.exp(rng.normal(size=(200, 2)) * (0.1, 0.2))
    values[5], values[7, 1] = np.nan, np.inf  # in the first steps, which have no bound
    values[60], values[61, 0], values[90, 1], values[91] = 1e6, -np.inf, np.nan, 1e9
    values[150:] *= 1.5  # a loss that stays higher is no spike for ever
    decisions, bounds = numpy_decisions(values, 4.0)
    state, observe = spec.initial_state(), jax.jit(spec.observe)
    for pair, expected, bound in zip(values, decisions, bounds, strict=True):
        np.testing.assert_allclose(spec.bounds(state), bound, rtol=1e-9)
        state, skips = observe(state, jnp.asarray(pair))
        assert bool(skips) == expected
    assert state.total == sum(decisions) and not any(decisions[180:])
    assert {5, 7, 60, 61, 90, 91, 150} <= set(np.flatnonzero(decisions).tolist())


def test_values_that_grow_are_no_spikes_and_equal_ones_have_room() -> None:
    spec = SkipSpikes(factor=3.0)
    for values in (1.02 ** np.arange(300.0), 2.0 + 1e-3 * (np.arange(300) % 99 == 98)):
        state = spec.initial_state()
        for value in values:
            state, _ = spec.observe(state, jnp.full(2, value, float))
        assert state.total == 0


def bigram(layout: Layout, microbatches: int, **changes: Any) -> TrainStepSpec:
    made = TrainStepSpec(Bigram(layout), ADAMW, Criterion(), STEPS, 3, microbatches,
                         skip_spikes=SkipSpikes(), ema=0.8)  # fmt: skip
    return dataclasses.replace(made, **changes)


def trained(step_spec: TrainStepSpec, batches: list[Any], start: Any) -> tuple[State, list[Any]]:
    """The state after steps on these batches, and their metrics."""
    layout = step_spec.model.layout
    mesh = make_mesh(layout)
    sharding = BatchSharding(layout, mesh, 8, step_spec.microbatches)
    lines = []
    with jax.set_mesh(mesh):
        state = start(init_state(step_spec, mesh))
        for batch in batches:
            state, metrics = train_step(step_spec, state, sharding.to_global_arrays(batch))
            lines.append(jax.device_get(metrics))
    return state, lines


def with_mark(state: State, value: float) -> State:
    """Gives one token an embedding that makes a spike of each batch with it."""
    embed_VD = state["params"]["embed_VD"]
    marked = np.array(embed_VD)
    marked[MARK if len(marked) == VOCAB else -1] = value
    params = state["params"] | {"embed_VD": jax.device_put(marked, embed_VD.sharding)}
    return state | {"params": params}


def is_schedule(part: Any) -> bool:
    return isinstance(part, optax.ScaleByScheduleState)


def without_schedule(tree: Any) -> Any:
    """Leaves out the count of the schedule, which goes on with the steps."""
    return jax.tree.map(lambda x: None if is_schedule(x) else x, tree, is_leaf=is_schedule)


def batches_with_a_spike() -> list[dict[str, np.ndarray]]:
    rows = text_rows(8 * STEPS)
    rows.arrays["targets"][rows.arrays["targets"] == MARK] = 2  # type: ignore[index]
    batches = [rows.batch(np.arange(8) + 8 * step) for step in range(STEPS)]
    batches[SPIKE]["inputs_BL"][:, 1] = MARK
    return batches


@pytest.mark.few(1)
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(("layout", "microbatches"), [(WHOLE, 1), (WHOLE, 2), (SPLIT, 2)], ids=str)
def test_a_run_with_a_spike_is_the_run_without_its_batch(layout: Layout, microbatches: int) -> None:
    adamw = AdamW(schedule=Constant(peak=0.01, warmup_steps=2))
    step_spec, batches = bigram(layout, microbatches, optimizer=adamw), batches_with_a_spike()
    without = batches[:SPIKE] + batches[SPIKE + 1 :]
    state, lines = trained(step_spec, batches, lambda state: with_mark(state, 1e4))
    expected, other_lines = trained(step_spec, without, lambda state: with_mark(state, 1e4))
    assert [line["skipped"] for line in lines] == [int(step == SPIKE) for step in range(STEPS)]
    assert lines[-1]["skipped_total"] == 1 and state["step"] == STEPS
    assert lines[SPIKE]["loss"] > lines[SPIKE]["loss_bound"]
    for name in ("params", "opt_state"):
        for path, array in arrays(without_schedule(expected[name])).items():
            actual = arrays(without_schedule(state[name]))[path]
            np.testing.assert_array_equal(actual, array, err_msg=path)
    del lines[SPIKE]
    for line, other in zip(lines, other_lines, strict=True):
        for name in ("loss", "grad_norm", "learning_rate"):
            assert line[name] == other[name]
    # What is never skipped trains as without the setting.
    plain, _ = trained(
        dataclasses.replace(step_spec, skip_spikes=None), without,
        lambda state: with_mark(state, 1e4),
    )  # fmt: skip
    for path, array in arrays(plain["params"]).items():
        np.testing.assert_allclose(arrays(expected["params"])[path], array, rtol=ROUND_OFF)


def test_the_learning_rate_is_that_of_the_step_also_after_spikes() -> None:
    step_spec, batches = bigram(WHOLE, 1), batches_with_a_spike()
    state, lines = trained(step_spec, batches, lambda state: with_mark(state, 1e4))
    rate = ADAMW.schedule.rate(STEPS)
    rates = [float(rate(jnp.int32(step))) for step in range(STEPS)]
    np.testing.assert_allclose([line["learning_rate"] for line in lines], rates, rtol=1e-6)
    counts = [x.count for x in jax.tree.leaves(state["opt_state"], is_leaf=is_schedule)
              if is_schedule(x)]  # fmt: skip
    assert counts == [STEPS] and lines[-1]["skipped_total"] == 1


@pytest.mark.long
def test_a_loss_that_is_no_number_moves_no_bias_of_a_router() -> None:
    experts = Moe(experts=4, d_ff=6, router=SigmoidTopK(k=2))
    spec = dataclasses.replace(TOY, layers=1, feed_forward=experts, tied=False)
    adamw = AdamW(schedule=Constant(peak=0.01))
    step_spec = bigram(WHOLE, 1, model=spec.model(WHOLE), optimizer=adamw)
    batches = [packed_rows([[4, 3]] * 8, spec.length, spec.vocab - 1, seed) for seed in range(4)]
    spike = {name: array.copy() for name, array in batches[1].items()}
    spike["inputs_BL"][0, 1] = spec.vocab - 1

    def start(state: State) -> State:
        return with_mark(state, np.nan)

    state, lines = trained(step_spec, [batches[0], spike, *batches[1:]], start)
    expected, _ = trained(step_spec, batches, start)
    assert [int(line["skipped"]) for line in lines] == [0, 1, 0, 0, 0]
    biases = 0
    for name in ("params", "opt_state"):
        for path, array in arrays(without_schedule(expected[name])).items():
            actual = arrays(without_schedule(state[name]))[path]
            np.testing.assert_array_equal(actual, array, err_msg=path)
            biases += "bias" in path and bool(array.any())
    assert biases


def test_a_resumed_run_skips_the_same_updates_bit_for_bit(tmp_path: Path) -> None:
    run = dataclasses.replace(TIGHT, microbatches=2)
    whole, rest = Recorder(), Recorder()
    train(job(tmp_path / "a", run), [whole])
    train(job(tmp_path / "b", dataclasses.replace(run, steps=FIRST_STEPS + 2)))
    train(job(tmp_path / "b", run), [rest])
    states = [arrays(state_of(run, tmp_path / name)) for name in "ab"]
    assert 0 < states[0]["spikes/total"] < STEPS - FIRST_STEPS
    for path, array in states[0].items():
        np.testing.assert_array_equal(array, states[1][path], err_msg=path)
    assert rest.losses.items() <= whole.losses.items()


@pytest.mark.long
@pytest.mark.usefixtures("float64")
def test_no_layout_changes_what_is_skipped(tmp_path: Path) -> None:
    run = dataclasses.replace(TIGHT, model=dataclasses.replace(RUN.model, precision=FLOAT64))
    split = dataclasses.replace(job(tmp_path / "split", run), layout=SPLIT, mesh=make_mesh(SPLIT))
    train(job(tmp_path / "whole", run))
    train(split)
    one, other = (arrays(state_of(run, tmp_path / name, SPLIT)) for name in ("whole", "split"))
    assert one["spikes/total"] == other["spikes/total"] > 0
    for path, array in one.items():
        np.testing.assert_allclose(other[path], array, rtol=ROUND_OFF, atol=ROUND_OFF)


def test_a_run_that_diverges_stops_after_the_limit(tmp_path: Path, log_lines: list[str]) -> None:
    run = dataclasses.replace(
        TIGHT, skip_spikes=SkipSpikes(limit=3), checkpoint_every=1,
        optimizer=AdamW(schedule=Constant(peak=1e38), clip_global_norm=None),
    )  # fmt: skip
    recorder = Recorder()
    with pytest.raises(RunError) as error:
        train(job(tmp_path, run), [recorder])
    first, *others = str(error.value).splitlines()
    skipped = [line for line in log_lines if "update skipped" in line]
    assert [*recorder.losses] == [*range(1, max(recorder.losses) + 1)] and len(skipped) == 3
    assert (
        "loss nan (bound inf) and gradient norm nan (bound inf); 2 in a row, 2 in all."
        in (skipped[1])
    )
    step = max(recorder.losses)
    assert f"`meshloom inspect data --step={step}` shows them." in skipped[2]
    assert first.startswith(f"Step {step + 1}: update skipped") and "4 in a row" in first
    assert others[0] == (
        "  SkipSpikes.limit allows 3 in a row.  If these are not spikes, raise SkipSpikes.factor, "
        "with --override."
    )
    assert others[1].startswith("  Checkpoints from step 1 on contain the weights that diverged.")
    assert others[3] == f"  Last saved checkpoint: step {step}."


def test_the_setting_may_come_and_go_in_the_middle_of_a_run(tmp_path: Path) -> None:
    before = dataclasses.replace(TIGHT, skip_spikes=None, steps=2)
    on = dataclasses.replace(TIGHT, steps=4)
    with pytest.raises(UserError, match=r"Run\.skip_spikes: .*: legal with --override"):
        check_changes("run", before, on, override=False)
    looser = dataclasses.replace(on, skip_spikes=SkipSpikes(factor=9.0, limit=99))
    for old, new in ((before, on), (on, before), (on, looser)):
        assert check_changes("run", old, new, override=True)
    train(job(tmp_path, before))
    assert not state_of(on, tmp_path)["spikes"].steps.any()
    train(job(tmp_path, on))
    assert state_of(on, tmp_path)["spikes"].steps.tolist() == [2, 2]
    train(job(tmp_path, dataclasses.replace(before, steps=5)))
    assert "spikes" not in state_of(before, tmp_path)


def test_a_plan_knows_the_state() -> None:
    state = abstract_state(bigram(SPLIT, 1), make_mesh(SPLIT).abstract_mesh)
    assert state["spikes"].mean.shape == (2,) and Run.skip_spikes is None
