"""Compares training speed with the same model in PyTorch, in alternating rounds.

    meshloom bench train --json=bench.json

"torch" runs PyTorch eagerly, and "torch_compiled" runs it through torch.compile.
"""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Annotated, Any

import numpy as np

from scripts.benchmarks import rounds
from scripts.benchmarks.language_model import SHAPES, Shape, torch_model, transformer
from scripts.benchmarks.rounds import ComparisonFlags, Count
from scripts.flag import Flag

RATE, BETAS, DECAY = 1e-3, (0.9, 0.98), 0.01
ADAMW: dict[str, Any] = {"beta1": BETAS[0], "beta2": BETAS[1], "weight_decay": DECAY}
TORCH_ADAMW: dict[str, Any] = {"lr": RATE, "betas": BETAS, "weight_decay": DECAY, "fused": True}

Batch = dict[str, Any]


class Trainer:
    """Trains a Meshloom model on one device."""

    def __init__(self, spec: Any, rows: int, microbatches: int, label_smoothing: float = 0.0):
        from layouts.layout import Layout
        from layouts.mesh import make_mesh
        from models.loss import Criterion
        from trainer.feed import BatchSharding
        from trainer.optimizers.adamw import AdamW
        from trainer.optimizers.schedules import Constant
        from trainer.step import TrainStepSpec, init_state

        optimizer = AdamW(schedule=Constant(peak=RATE), clip_global_norm=None, **ADAMW)
        layout = Layout(mesh="data:1", rules="batch:data")
        self._mesh = make_mesh(layout)
        self.to_device = BatchSharding(layout, self._mesh, rows, microbatches).to_global_arrays
        model, criterion = spec.model(layout), Criterion(label_smoothing=label_smoothing)
        self._step_spec = TrainStepSpec(
            model, optimizer, criterion, steps=10**6, seed=0, microbatches=microbatches
        )
        self._state = init_state(self._step_spec, self._mesh)

    def train(self, batches: Iterable[Batch]) -> None:
        """Trains one step on each batch, and waits for the last."""
        import jax

        from trainer.step import train_step

        with jax.set_mesh(self._mesh):
            for batch in batches:
                self._state, metrics = train_step(self._step_spec, self._state, batch)
            jax.block_until_ready((self._state, metrics))


LEGAL = ("meshloom", "torch", "torch_compiled")

Run = Callable[[int], object]  # runs a number of steps and waits for the last


def meshloom(shape: Shape) -> tuple[Run, dict[str, object]]:
    """Returns Meshloom's training step, with the fastest settings for this device."""
    import jax
    import jax.numpy as jnp

    platform, kind = jax.devices()[0].platform, jax.devices()[0].device_kind
    microbatches = shape.cpu_slices[0] if platform == "cpu" else 1
    trainer = Trainer(transformer(shape), shape.rows, microbatches)
    ids = shape.ids()
    arrays = {
        "inputs_BL": ids[:, :-1],
        "targets_BL": ids[:, 1:],
        "segments_BL": np.ones((shape.rows, shape.length), np.int32),
        "positions_BL": np.tile(np.arange(shape.length, dtype=np.int32), (shape.rows, 1)),
    }
    batch = trainer.to_device(arrays)
    size = rounds.MATRIX[platform == "gpu"]
    dtype = jnp.bfloat16 if platform == "gpu" else jnp.float32
    square = jax.random.normal(jax.random.key(0), (size, size), dtype)  # ones would be faster
    product = jax.jit(jnp.matmul)
    product_s = rounds.device_seconds(lambda: product(square, square), jax.block_until_ready)
    about = {"jax": jax.__version__, "device": kind, "matrix_flops_per_s": 2 * size**3 / product_s}
    return lambda steps: trainer.train([batch] * steps), about


def torch(shape: Shape, compiled: bool) -> tuple[Run, dict[str, object]]:
    """Returns the same model in PyTorch, with fused AdamW and scaled-dot-product attention."""
    import torch

    gpu = torch.cuda.is_available()
    device = "cuda" if gpu else "cpu"
    torch.set_num_threads(rounds.cores())
    torch.set_float32_matmul_precision("high" if gpu else "highest")
    model = torch_model(shape).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), **TORCH_ADAMW)
    loss_of = torch.compile(model) if compiled else model
    ids = torch.from_numpy(shape.ids().astype(np.int64)).to(device)
    inputs, targets = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    def run(steps: int) -> None:
        for _ in range(steps):
            with torch.autocast(device, torch.bfloat16, enabled=gpu):
                loss = loss_of(inputs, targets)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
        float(loss.detach())

    size = rounds.MATRIX[gpu]
    dtype = torch.bfloat16 if gpu else torch.float32
    square = torch.randn(size, size, device=device, dtype=dtype)
    product_s = rounds.device_seconds(lambda: square @ square, lambda result: float(result[0, 0]))
    about = {"torch": torch.__version__, "threads": torch.get_num_threads()}
    return run, {**about, "matrix_flops_per_s": 2 * size**3 / product_s}


class Flags(ComparisonFlags):
    """Compares training speed with PyTorch, or with another checkout."""

    rounds: Count = 7
    systems: Annotated[tuple[str, ...], Flag(choices=LEGAL)] = LEGAL[:2]
    """Systems to compare, separated by commas.  Legal: meshloom, torch, torch_compiled."""
    steps: Count = 6
    """Steps per round."""
    shape: Annotated[str, Flag(choices=tuple(SHAPES))] = "small"
    """The model and its batch."""


def benchmark(flags: Flags) -> None:
    """Measures the speed of each system, and Meshloom's speed relative to the others."""
    shape = SHAPES[flags.shape]
    if flags.worker is not None:
        compiled = flags.worker == "torch_compiled"
        run, about = meshloom(shape) if flags.worker == "meshloom" else torch(shape, compiled)
        about["warm_s"] = rounds.seconds(lambda: run(1))
        return rounds.serve_steps(about, run, warmup=2)
    result, times = rounds.compare("train", flags, flags.steps, f"--shape={flags.shape}")
    rate = max(system.get("matrix_flops_per_s", 0) for system in result.values())
    for system in result.values():
        system["tokens_per_s"] = shape.tokens / system["median_s"]
        system["flops_per_s"] = shape.step_flops / system["median_s"]
        system["share_of_matrix_rate"] = system["flops_per_s"] / rate
    if {"meshloom", "torch"} <= set(result):
        result |= rounds.ratio(times, "meshloom", "torch")
    if {"meshloom", "torch_compiled"} <= set(result):
        result["to_torch_compiled"] = rounds.ratio(times, "meshloom", "torch_compiled")
    named = {"name": flags.shape, **dataclasses.asdict(shape)}
    numbers = {"shape": named, "matrix_flops_per_s": rate, "steps_a_round": flags.steps}
    rounds.report(flags, result, times, **numbers)
