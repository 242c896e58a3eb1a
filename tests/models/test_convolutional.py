"""A convolutional network: equal under every layout of images, resumed exactly, and its errors."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from configs.errors import UserError
from configs.load import load
from data.packing.rows import Rows
from data.sources.pair_kinds import Tsv
from data.sources.text import TextFiles
from data.task import Task
from data.tokenizers.labels import Labels
from data.tokenizers.sentence_piece import SentencePiece
from data.vocabs import Vocabs
from layouts.layout import Layout
from layouts.mesh import make_mesh
from models.loss import CROSS_ENTROPY
from tests.toys import FLOAT64, ROOT, ROUND_OFF, SPLITTABLE, WHOLE, example
from tests.trainer.conftest import optax_types  # noqa: F401
from trainer.checks import check_layout, check_run, record_loss
from trainer.evaluate import evaluate
from trainer.feed import BatchSharding
from trainer.loop import TrainJob, train
from trainer.observers import Observer, StepResult
from trainer.optimizers.adamw import AdamW
from trainer.optimizers.schedules import Constant
from trainer.planning.search import candidates
from trainer.run import Run
from trainer.step import TrainStepSpec, init_state, train_step

pytestmark = pytest.mark.usefixtures("float64")
HEIGHT, WIDTH, CLASSES, ROWS, STEPS = 11, 9, 5, 6, 3
ConvNet = example("convnet").ConvNet
image_task = example("image_task")
SPEC = ConvNet(vocab=CLASSES, channels=3, d_model=4, d_ff=8, layers=2, precision=FLOAT64)
TASK = image_task.ImageTask(
    name="toy", source=Tsv(train="x", validation="x"), height=HEIGHT, width=WIDTH, channels=3
)
ADAMW = AdamW(schedule=Constant(peak=3e-3, warmup_steps=2), epsilon=1e-5)
RUN = Run(model=SPEC, task=TASK, steps=4, batch_sequences=ROWS, checkpoint_every=2, optimizer=ADAMW)
SHIPPED = {
    path.stem: load([str(path)]).make(Layout) for path in sorted(ROOT.glob("layouts/images/*.gin"))
}
LAYOUTS = SHIPPED | {
    "channels and weights": Layout(
        mesh="data:2,model:2,columns:2", rules="batch:data;width:columns+;d_ff:model",
        param_rules="d_model:data",
    ),
    "padded batch": Layout(mesh="data:4,rows:2", rules="batch:data+;height:rows+"),
}  # fmt: skip
TEXT = Task(name="toy", source=TextFiles(train="x"), vocab=SentencePiece(size=288), length=6)
VOCABS = Vocabs(Labels().train(iter("abcde"), ()), None)


def image_rows(count: int, seed: int = 0) -> Rows:
    """Random images with random labels, as files have them."""
    rng = np.random.default_rng(seed)
    pixels = rng.integers(0, 256, (count, HEIGHT, WIDTH, 3)).astype(np.uint8)
    labels = rng.choice(list("abcde"), count)
    lines = [
        f"{image_task.image_text(image)}\t{label}"
        for image, label in zip(pixels, labels, strict=True)
    ]
    return TASK.pack_lines(lines, VOCABS, None)[0]


class Trained(NamedTuple):
    """Losses and gradient norms of some steps, and the weights before and after them."""

    numbers: list[float]
    first: dict[str, Any]
    last: dict[str, Any]


def steps_under(layout: Layout) -> Trained:
    """Trains some steps under a layout."""
    program = TrainStepSpec(SPEC.model(layout), ADAMW, CROSS_ENTROPY, STEPS, seed=1)
    mesh, rows, numbers = make_mesh(layout), image_rows(STEPS * ROWS), []
    state = init_state(program, mesh)
    first = jax.device_get(state["params"])
    with jax.set_mesh(mesh):
        for step in range(STEPS):
            ids = np.arange(step * ROWS, (step + 1) * ROWS)
            batch = BatchSharding(layout, mesh, ROWS).to_global_arrays(rows.batch(ids))
            state, metrics = train_step(program, state, batch)
            numbers += [float(metrics["loss"]), float(metrics["grad_norm"])]
    return Trained(numbers, first, jax.device_get(state["params"]))


@pytest.fixture(scope="module")
def whole() -> Trained:
    return steps_under(WHOLE)


@pytest.mark.parametrize("name", LAYOUTS)
def test_training_under_a_layout_is_training_on_one_device(name: str, whole: Trained) -> None:
    """Heights of 11 and 6, widths of 9 and 5: none divides."""
    split = steps_under(LAYOUTS[name])
    np.testing.assert_allclose(split.numbers, whole.numbers, rtol=ROUND_OFF)
    for weight, expected in zip(*map(jax.tree.leaves, (split.last, whole.last)), strict=True):
        np.testing.assert_allclose(weight, expected, rtol=0, atol=ROUND_OFF)


def test_training_changes_every_weight_and_loss(whole: Trained) -> None:
    """Or the sweep would compare nothing with nothing."""
    before, after = map(jax.tree.leaves, (whole.first, whole.last))
    assert all(np.abs(a - b).max() > 1e-4 for a, b in zip(before, after, strict=True))
    assert len(set(whole.numbers)) == 2 * STEPS


class Losses(Observer):
    """Keeps the losses; ends the run after a step."""

    def __init__(self, ends_after: int | None = None):
        self.ends_after, self.losses = ends_after, dict[int, float | None]()

    def on_step(self, result: StepResult) -> None:
        self.losses[result.step] = result.line["loss"]
        if result.step == self.ends_after:
            raise InterruptedError


def test_a_run_resumes_exactly_and_is_evaluated(tmp_path: Path) -> None:
    splits = {"train": image_rows(14), "validation": image_rows(7, seed=1)}
    layout = SHIPPED["height_and_width"]

    def losses(name: str, ends_after: int | None = None) -> Mapping[int, float | None]:
        observer = Losses(ends_after)
        job = TrainJob(RUN, layout, make_mesh(layout), splits, tmp_path / name)
        if ends_after is None:
            train(job, [observer])
        else:
            with pytest.raises(InterruptedError):
                train(job, [observer])
        return observer.losses

    straight, killed = losses("straight"), losses("killed", ends_after=3)
    assert losses("killed") == {step: straight[step] for step in (3, 4)}
    assert killed == {step: straight[step] for step in (1, 2, 3)}


def test_a_model_of_ones_own_is_trained_on_the_logits_that_it_is_scored_by(
    whole: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ConvNet, "logit_cap", 0.3)
    model, batch = SPEC.model(WHOLE), image_rows(6).batch(np.arange(6))
    with jax.set_mesh(make_mesh(WHOLE)):
        sums = jax.jit(model.loss, static_argnums=2)(whole.last, batch, CROSS_ENTROPY)
        scored = jax.jit(model.token_losses)(whole.last, batch).loss_BL
    np.testing.assert_allclose(sums.loss, np.sum(scored), rtol=ROUND_OFF)


def test_an_evaluation_is_that_of_each_image(whole: Trained) -> None:
    """Rows that do not fill the last batch count nothing; there is no text to count."""
    rows, mesh = image_rows(8), make_mesh(WHOLE)
    model = SPEC.model(WHOLE)
    evaluation, _ = evaluate(model, whole.last, rows, mesh, batch_sequences=ROWS)
    with jax.set_mesh(mesh):
        losses = jax.jit(model.token_losses)(whole.last, rows.batch(np.arange(8))).loss_BL
    assert evaluation.tokens == 8 and np.isclose(evaluation.loss, np.mean(losses), rtol=ROUND_OFF)
    assert evaluation.numbers().keys() == {
        "loss", "accuracy", "examples"
    }  # fmt: skip
    assert str(evaluation).endswith(f"accuracy {evaluation.accuracy:.2%}")


def test_a_size_that_does_not_divide_is_a_problem_of_the_layout() -> None:
    layout = Layout(mesh="x:4", rules="height:x")
    with pytest.raises(UserError) as error:
        check_layout(RUN, layout, {"x": 4}, {"Layout.rules": "layouts/mine.gin:2"})
    for part in ("height = 11", "height = 6 does", "docs/examples/convnet.py", '"height:x+"'):
        assert part in str(error.value)
    check_layout(RUN, dataclasses.replace(layout, rules="height:x+"), {"x": 4}, {})


def test_kernels_may_reach_over_several_devices() -> None:
    """Six rows over four devices, and windows that reach three rows up and down."""
    model, batch = dataclasses.replace(SPEC, kernel=7), image_rows(2).batch(np.arange(2))

    def loss(layout: Layout) -> float:
        with jax.set_mesh(make_mesh(layout)):
            params = jax.jit(model.model(layout).init)(jax.random.key(0))
            return float(jax.jit(model.model(layout).token_losses)(params, batch).loss_BL.sum())

    np.testing.assert_allclose(
        loss(Layout(mesh="rows:4", rules="height:rows+")), loss(WHOLE), rtol=ROUND_OFF
    )


@pytest.mark.parametrize(
    ("run", "part"),
    [
        (dataclasses.replace(RUN, model=dataclasses.replace(SPEC, channels=1)),
         "images_BYXZ of channels 3, but Run.model = @ConvNet() needs 1"),
        (dataclasses.replace(RUN, model=SPLITTABLE), "Run.model = @Transformer() needs inputs_BL"),
        (dataclasses.replace(RUN, task=TEXT), "Run.model = @ConvNet() needs images_BYXZ"),
    ],
)  # fmt: skip
def test_a_task_whose_batches_the_model_cannot_read_is_refused(run: Run, part: str) -> None:
    with pytest.raises(UserError) as error:
        check_run(run)
    assert part in str(error.value)


def test_a_search_of_layouts_splits_images() -> None:
    rules = {layout.rules for layout in candidates(record_loss(RUN), 4)}
    assert {"batch:data;height:model+", "height:model+"} <= rules


def test_a_network_of_images_continues_no_text() -> None:
    with pytest.raises(UserError, match=r"@ConvNet\(\): it cannot continue text.*evaluate"):
        SPEC.model(WHOLE).prepare({})


def test_products_of_8_bits_are_refused() -> None:
    with pytest.raises(UserError, match="@ConvNet\\(\\) rounds no products"):
        dataclasses.replace(SPEC, precision=dataclasses.replace(FLOAT64, products="int8"))
