"""Training speed beside an equal model in eager PyTorch, interleaved in one run.

    pip install torch
    python -m scripts.benchmarks.train --json=bench.json

Each system trains in a process of its own, in alternating rounds, so that a machine whose speed
drifts is equally unfair to both; the ratio is the median over rounds of one round's rates.  The
model has 4 layers, d_model 256, d_ff 1024, 4 heads, 8,192 tied words; a batch has 16 x 256 tokens;
float32 weights and AdamW; without dropout.  On a GPU both compute in bfloat16.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np

from scripts.benchmarks.rounds import (
    cores,
    ended,
    matrix_rate,
    options,
    ratio,
    rounds,
    serve,
    show,
    speedups,
    start,
)

if TYPE_CHECKING:
    from layouts.layout import Layout
    from trainer.step import TrainStepSpec

LAYERS, D_MODEL, D_FF, HEADS, VOCAB = 4, 256, 1024, 4, 8192
ROWS, LENGTH = 16, 256
TOKENS = ROWS * LENGTH
# Products of a forward pass, by token; of attention only the half that causality leaves.
MATRIX_FLOPS = 2 * (LAYERS * (4 * D_MODEL**2 + 2 * D_MODEL * D_FF) + VOCAB * D_MODEL)
ATTENTION_FLOPS = 2 * LAYERS * LENGTH * D_MODEL
STEP_FLOPS = 3 * TOKENS * (MATRIX_FLOPS + ATTENTION_FLOPS)
WARMUP_STEPS = 3
LEARNING_RATE, BETAS, WEIGHT_DECAY = 1e-3, (0.9, 0.98), 0.01

Run = Callable[[int], object]  # runs so many steps and waits for the last


def tokens(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(2, VOCAB, (ROWS, LENGTH + 1)).astype(np.int32)


def train_step_spec(layout: "Layout", gpu: bool) -> "TrainStepSpec":
    """Returns the training step of the model, with the settings that are fastest here."""
    from models.architectures import Transformer
    from models.loss import Criterion
    from models.spec import Precision
    from trainer.optimizers.adamw import AdamW
    from trainer.optimizers.schedules import Constant
    from trainer.step import TrainStepSpec

    spec = Transformer(
        vocab=VOCAB,
        layers=LAYERS,
        d_model=D_MODEL,
        d_ff=D_FF,
        heads=HEADS,
        d_kv=D_MODEL // HEADS,
        positions="learned",
        length=LENGTH,
        scan=False,
        combined_qkv=True,
        loss_chunks=1 if gpu else 2,
        attention_chunks=1 if gpu else 2,
        precision=Precision(compute="bfloat16" if gpu else "float32"),
    )
    optimizer = AdamW(
        schedule=Constant(peak=LEARNING_RATE),
        beta1=BETAS[0],
        beta2=BETAS[1],
        weight_decay=WEIGHT_DECAY,
        clip_global_norm=None,
    )
    return TrainStepSpec(
        model=spec.model(layout),
        optimizer=optimizer,
        criterion=Criterion(),
        steps=10**6,
        seed=0,
        microbatches=1 if gpu else 4,  # their activations stay in the processor's cache
    )


def meshloom() -> tuple[Run, Callable[[], float], dict[str, object]]:
    """Returns Meshloom's training step, as `meshloom train` runs it."""
    import jax
    import jax.numpy as jnp

    from layouts.layout import Layout
    from layouts.mesh import make_mesh
    from trainer.feed import place, placement
    from trainer.step import init_state, train_step

    layout = Layout(mesh="data:1", rules="batch:data")
    mesh = make_mesh(layout)
    program = train_step_spec(layout, gpu=jax.devices()[0].platform == "gpu")
    ids = tokens()
    host = {
        "inputs_BL": ids[:, :-1],
        "targets_BL": ids[:, 1:],
        "segments_BL": np.ones((ROWS, LENGTH), np.int32),
        "positions_BL": np.tile(np.arange(LENGTH, dtype=np.int32), (ROWS, 1)),
    }
    places = placement(layout, mesh, program.microbatches)
    batch = place(places, host, ROWS, program.microbatches)
    state = init_state(program, mesh)

    def run(steps: int) -> None:
        nonlocal state
        with jax.set_mesh(mesh):
            for _ in range(steps):
                state, metrics = train_step(program, state, batch)
            jax.block_until_ready((state, metrics))

    square = jnp.ones((2048, 2048))
    product = jax.jit(jnp.matmul)
    return (
        run,
        lambda: matrix_rate(lambda: product(square, square).block_until_ready()),
        {"jax": jax.__version__, "device": jax.devices()[0].device_kind},
    )


def torch() -> tuple[Run, Callable[[], float], dict[str, object]]:
    """Returns the same model in eager PyTorch: fused AdamW, scaled-dot-product attention."""
    import torch
    from torch import nn
    from torch.nn import functional

    device = "cuda" if torch.cuda.is_available() else "cpu"

    class TorchBlock(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention_norm, self.mlp_norm = nn.RMSNorm(D_MODEL), nn.RMSNorm(D_MODEL)
            self.qkv = nn.Linear(D_MODEL, 3 * D_MODEL, bias=False)
            self.out = nn.Linear(D_MODEL, D_MODEL, bias=False)
            self.wi = nn.Linear(D_MODEL, D_FF, bias=False)
            self.wo = nn.Linear(D_FF, D_MODEL, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            heads = (ROWS, LENGTH, HEADS, D_MODEL // HEADS)
            parts = self.qkv(self.attention_norm(x)).chunk(3, dim=-1)
            q, k, v = (part.view(heads).transpose(1, 2) for part in parts)
            y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(y.transpose(1, 2).reshape(ROWS, LENGTH, D_MODEL))
            return x + self.wo(functional.relu(self.wi(self.mlp_norm(x))))

    class TorchModel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(VOCAB, D_MODEL)
            nn.init.normal_(self.embed.weight, std=D_MODEL**-0.5)
            self.places = nn.Embedding(LENGTH, D_MODEL)
            nn.init.normal_(self.places.weight, std=D_MODEL**-0.5)
            self.blocks = nn.ModuleList(TorchBlock() for _ in range(LAYERS))
            self.norm = nn.RMSNorm(D_MODEL)

        def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            x = (self.embed(inputs) + self.places.weight) * D_MODEL**0.5
            for block in self.blocks:
                x = block(x)
            logits = functional.linear(self.norm(x), self.embed.weight)
            return functional.cross_entropy(logits.view(TOKENS, VOCAB).float(), targets.view(-1))

    torch.manual_seed(0)
    torch.set_num_threads(cores())
    model = TorchModel().to(device)
    optimizer = torch.optim.AdamW(
        model.parameters(), LEARNING_RATE, BETAS, weight_decay=WEIGHT_DECAY, fused=True
    )
    ids = torch.from_numpy(tokens().astype(np.int64)).to(device)
    inputs, targets = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    def run(steps: int) -> None:
        for _ in range(steps):
            with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                loss = model(inputs, targets)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
        float(loss.detach())

    square = torch.ones(2048, 2048, device=device)
    return (
        run,
        lambda: matrix_rate(lambda: float((square @ square)[0, 0])),
        {"torch": torch.__version__, "threads": torch.get_num_threads()},
    )


def work(system: str) -> None:
    """Answers steps to run with seconds a step, and "matrix" with FLOP/s."""
    run, rate, about = {"meshloom": meshloom, "torch": torch}[system]()
    run(WARMUP_STEPS)

    def answer(question: str) -> float:
        if question == "matrix":
            return rate()
        start = time.perf_counter()
        run(int(question))
        return (time.perf_counter() - start) / int(question)

    serve(about, answer)


@click.command()
@options(("meshloom", "torch"), count=7)
@click.option("--steps", default=6, show_default=True, help="Steps in a round.")
def main(
    worker: str | None,
    count: int,
    systems: str,
    baseline: Path | None,
    steps: int,
    json_file: str | None,
) -> None:
    """Compares training speed with PyTorch, or with another checkout."""
    if worker is not None:
        return work(worker)
    workers = start("scripts.benchmarks.train", systems.split(","), baseline)
    seconds = list(rounds(workers, dict.fromkeys(workers, steps), count))
    rate = max(worker.ask("matrix") for worker in workers.values())
    result: dict[str, Any] = ended(workers, seconds)
    for system in result.values():
        system["tokens_per_s"] = TOKENS / system["median_s"]
        system["flops_per_s"] = STEP_FLOPS / system["median_s"]
        system["share_of_matrix_rate"] = system["flops_per_s"] / rate
    if {"meshloom", "torch"} <= set(workers):
        result |= ratio(seconds, "meshloom", "torch")
    result |= {
        **speedups(seconds),
        "matrix_flops_per_s": rate,
        "rounds": count,
        "steps_a_round": steps,
    }
    show(result, json_file)


if __name__ == "__main__":
    main()
