"""Defines what the training benchmarks share: AdamW, and the step of `meshloom train`."""

from collections.abc import Iterable
from typing import Any

RATE, BETAS, DECAY = 1e-3, (0.9, 0.98), 0.01
TORCH_ADAMW: dict[str, Any] = {"lr": RATE, "betas": BETAS, "weight_decay": DECAY, "fused": True}

Batch = dict[str, Any]


class Trainer:
    """Trains a model of Meshloom's on one device."""

    def __init__(
        self, spec: Any, rows: int, microbatches: int, label_smoothing: float = 0.0
    ) -> None:
        from layouts.layout import Layout
        from layouts.mesh import make_mesh
        from models.loss import Criterion
        from trainer.feed import BatchSharding
        from trainer.optimizers.adamw import AdamW
        from trainer.optimizers.schedules import Constant
        from trainer.step import TrainStepSpec, init_state

        beta1, beta2 = BETAS
        optimizer = AdamW(
            schedule=Constant(peak=RATE),
            beta1=beta1,
            beta2=beta2,
            weight_decay=DECAY,
            clip_global_norm=None,
        )
        layout = Layout(mesh="data:1", rules="batch:data")
        self._mesh = make_mesh(layout)
        self._sharding = BatchSharding(layout, self._mesh, rows, microbatches)
        self._step_spec = TrainStepSpec(
            model=spec.model(layout),
            optimizer=optimizer,
            criterion=Criterion(label_smoothing=label_smoothing),
            steps=10**6,
            seed=0,
            microbatches=microbatches,
        )
        self._state = init_state(self._step_spec, self._mesh)

    def to_device(self, batch: Batch) -> Batch:
        return self._sharding.to_global_arrays(batch)

    def train(self, batches: Iterable[Batch]) -> None:
        """Trains a step on each batch, and waits for the last."""
        import jax

        from trainer.step import train_step

        with jax.set_mesh(self._mesh):
            for batch in batches:
                self._state, metrics = train_step(self._step_spec, self._state, batch)
            jax.block_until_ready((self._state, metrics))
