"""Compares training speed with an equal model in PyTorch, interleaved in one run.

    pip install torch
    meshloom bench train --json=bench.json

Each system trains in a process of its own, in alternating rounds, so that a machine whose speed
drifts is equally unfair to both; the ratio is the median over rounds of one round's rates.  The
model is one of `language_model.SHAPES`, "small" unless --shape says otherwise, with AdamW.  PyTorch
runs eagerly as "torch" and through torch.compile as "torch_compiled".
"""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np

from scripts.benchmarks.language_model import SHAPES, Shape, torch_model, transformer
from scripts.benchmarks.options import BaselineFlags, Count
from scripts.benchmarks.rounds import (
    MATRIX,
    best_seconds,
    cores,
    ended,
    ratio,
    rounds,
    seconds,
    serve,
    show,
    speedups,
    start,
)
from scripts.command_line import run_command
from scripts.flag import Flag

if TYPE_CHECKING:
    from layouts.layout import Layout
    from trainer.step import TrainStepSpec

WARMUP_STEPS = 3
LEARNING_RATE, BETAS, WEIGHT_DECAY = 1e-3, (0.9, 0.98), 0.01
LEGAL = ("meshloom", "torch", "torch_compiled")
DEFAULT_SHAPE = "small"

Run = Callable[[int], object]  # runs so many steps and waits for the last


def train_step_spec(shape: Shape, layout: "Layout") -> "TrainStepSpec":
    """Returns the training step of the model, with the settings that are fastest here."""
    import jax

    from models.loss import Criterion
    from trainer.optimizers.adamw import AdamW
    from trainer.optimizers.schedules import Constant
    from trainer.step import TrainStepSpec

    optimizer = AdamW(
        schedule=Constant(peak=LEARNING_RATE),
        beta1=BETAS[0],
        beta2=BETAS[1],
        weight_decay=WEIGHT_DECAY,
        clip_global_norm=None,
    )
    on_cpu = jax.devices()[0].platform == "cpu"
    return TrainStepSpec(
        model=transformer(shape).model(layout),
        optimizer=optimizer,
        criterion=Criterion(),
        steps=10**6,
        seed=0,
        microbatches=shape.cpu_slices[0] if on_cpu else 1,
    )


def meshloom(shape: Shape) -> tuple[Run, Callable[[], float], dict[str, object]]:
    """Returns Meshloom's training step, as `meshloom train` runs it."""
    import jax
    import jax.numpy as jnp

    from layouts.layout import Layout
    from layouts.mesh import make_mesh
    from trainer.feed import BatchSharding
    from trainer.step import init_state, train_step

    layout = Layout(mesh="data:1", rules="batch:data")
    mesh = make_mesh(layout)
    step_spec = train_step_spec(shape, layout)
    ids = shape.ids()
    host = {
        "inputs_BL": ids[:, :-1],
        "targets_BL": ids[:, 1:],
        "segments_BL": np.ones((shape.rows, shape.length), np.int32),
        "positions_BL": np.tile(np.arange(shape.length, dtype=np.int32), (shape.rows, 1)),
    }
    sharding = BatchSharding(layout, mesh, shape.rows, step_spec.microbatches)
    batch = sharding.to_global_arrays(host)
    state = init_state(step_spec, mesh)

    def run(steps: int) -> None:
        nonlocal state
        with jax.set_mesh(mesh):
            for _ in range(steps):
                state, metrics = train_step(step_spec, state, batch)
            jax.block_until_ready((state, metrics))

    gpu = jax.devices()[0].platform == "gpu"
    size = MATRIX[gpu]
    square = jnp.ones((size, size), jnp.bfloat16 if gpu else jnp.float32)
    product = jax.jit(jnp.matmul)
    return (
        run,
        lambda: 2 * size**3 / best_seconds(lambda: product(square, square).block_until_ready()),
        {"jax": jax.__version__, "device": jax.devices()[0].device_kind},
    )


def torch(shape: Shape, *, compiled: bool) -> tuple[Run, Callable[[], float], dict[str, object]]:
    """Returns the same model in PyTorch: fused AdamW, scaled-dot-product attention."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(cores())
    torch.set_float32_matmul_precision("high" if device == "cuda" else "highest")
    model = torch_model(shape).to(device)
    optimizer = torch.optim.AdamW(
        model.parameters(), LEARNING_RATE, BETAS, weight_decay=WEIGHT_DECAY, fused=True
    )
    loss_of = torch.compile(model) if compiled else model
    ids = torch.from_numpy(shape.ids().astype(np.int64)).to(device)
    inputs, targets = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    def run(steps: int) -> None:
        for _ in range(steps):
            with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                loss = loss_of(inputs, targets)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
        float(loss.detach())

    gpu = device == "cuda"
    size = MATRIX[gpu]
    dtype = torch.bfloat16 if gpu else torch.float32
    square = torch.ones(size, size, device=device, dtype=dtype)
    return (
        run,
        lambda: 2 * size**3 / best_seconds(lambda: float((square @ square)[0, 0])),
        {"torch": torch.__version__, "threads": torch.get_num_threads()},
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags(BaselineFlags):
    """Compares training speed with PyTorch, or with another checkout."""

    rounds: Count = 7
    systems: Annotated[tuple[str, ...], Flag(choices=LEGAL)] = LEGAL[:2]
    """Systems to compare, separated by commas.  Legal: meshloom, torch, torch_compiled."""
    steps: Count = 6
    """Steps in a round."""
    shape: Annotated[str, Flag(choices=tuple(SHAPES))] = DEFAULT_SHAPE
    """The model and its batch."""


def work(system: str, shape: Shape) -> None:
    """Answers steps to run with seconds per step, and "matrix" with FLOP/s."""
    if system.startswith("torch"):
        run, rate, about = torch(shape, compiled=system == "torch_compiled")
    else:
        run, rate, about = meshloom(shape)
    about["warm_s"] = seconds(lambda: run(1))
    run(WARMUP_STEPS - 1)

    def answer(question: str) -> float:
        if question == "matrix":
            return rate()
        return seconds(lambda: run(int(question))) / int(question)

    serve(about, answer)


def benchmark(flags: Flags) -> None:
    """Measures the speed of each system, and that of Meshloom relative to the others."""
    shape = SHAPES[flags.shape]
    if flags.worker is not None:
        return work(flags.worker, shape)
    # Older checkouts have no --shape.
    arguments = [] if flags.shape == DEFAULT_SHAPE else [f"--shape={flags.shape}"]
    workers = start("scripts.benchmarks.train", flags, *arguments)
    times = list(rounds(workers, dict.fromkeys(workers, flags.steps), flags.rounds))
    rate = max(worker.ask("matrix") for worker in workers.values())
    result: dict[str, Any] = ended(workers, times)
    for system in result.values():
        system["tokens_per_s"] = shape.tokens / system["median_s"]
        system["flops_per_s"] = shape.step_flops / system["median_s"]
        system["share_of_matrix_rate"] = system["flops_per_s"] / rate
    if "meshloom" in workers and "torch" in workers:
        result |= ratio(times, "meshloom", "torch")
    if "meshloom" in workers and "torch_compiled" in workers:
        result["to_torch_compiled"] = ratio(times, "meshloom", "torch_compiled")
    result |= {
        **speedups(times),
        "shape": {"name": flags.shape, **dataclasses.asdict(shape)},
        "matrix_flops_per_s": rate,
        "rounds": flags.rounds,
        "steps_a_round": flags.steps,
    }
    show(result, flags.json_file)


if __name__ == "__main__":
    run_command(Flags, benchmark)
