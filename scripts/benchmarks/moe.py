"""Compares a Mixture-of-Experts layer with a dense one, in alternating rounds.

    meshloom bench moe --json=bench.json

The dense layer has as many products per token.  Each way to dispatch runs in its own process, and
so do both layers in PyTorch.  `cost` is a layer's time divided by the time of the same library's
dense layer in the same round.
"""

import statistics
from collections.abc import Callable
from typing import Annotated, cast

from scripts.benchmarks import rounds
from scripts.benchmarks.rounds import ComparisonFlags, Count
from scripts.flag import Flag

ROWS, LENGTH, D_MODEL, D_FF, EXPERTS = 16, 256, 256, 1024, 16
SYSTEMS = ("dense", "gather", "einsum", "dropless", "torch_dense", "torch")

Pass = Callable[[], object]


def meshloom(kind: str) -> tuple[Pass, dict[str, object]]:
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from layouts.layout import Layout
    from layouts.mesh import make_mesh
    from models.feed_forward.mlp import Mlp
    from models.feed_forward.moe.layer import Dispatch, Moe
    from models.feed_forward.moe.routing import Top2
    from models.initializers import Weights
    from models.transformer import Transformer

    layout = Layout(mesh="data:1", rules="")
    mesh = make_mesh(layout)
    part: Mlp | Moe = Mlp()
    if kind != "dense":
        part = Moe(experts=EXPERTS, router=Top2(), dispatch=cast(Dispatch, kind), d_ff=D_FF)
    spec = Transformer(
        vocab=1, layers=1, d_model=D_MODEL, d_ff=2 * D_FF, heads=1, d_kv=D_MODEL, feed_forward=part
    )
    with jax.set_mesh(mesh):
        weights = Weights(layout, spec.sizes, nnx.Rngs(params=jax.random.key(0)), "float32")
        graph, params = nnx.split(part.build(spec, layout, weights))
        keys = jax.random.split(jax.random.key(1))
        x_BLD, dy_BLD = (jax.random.normal(key, (ROWS, LENGTH, D_MODEL)) for key in keys)
        segments_BL = jnp.ones((ROWS, LENGTH), jnp.int32)

    def objective(params: object, x_BLD: jax.Array, key: jax.Array) -> jax.Array:
        y_BLD, load = nnx.merge(graph, params)(x_BLD, segments_BL, key)
        objective = jnp.vdot(y_BLD, dy_BLD)
        return objective if load is None else objective + load.aux

    gradient = jax.jit(jax.grad(objective, argnums=(0, 1)))

    def once() -> None:
        with jax.set_mesh(mesh):
            jax.block_until_ready(gradient(params, x_BLD, jax.random.key(2)))

    return once, {"jax": jax.__version__}


def torch(kind: str) -> tuple[Pass, dict[str, object]]:
    """Returns the same in eager PyTorch: sorts tokens by expert, with one product per expert."""
    import torch
    from torch import nn
    from torch.nn import functional

    torch.manual_seed(0)
    torch.set_num_threads(rounds.cores())
    x = torch.randn(ROWS * LENGTH, D_MODEL, requires_grad=True)
    dy = torch.randn(ROWS * LENGTH, D_MODEL)
    wi = nn.Parameter(torch.randn(EXPERTS, D_MODEL, D_FF) / D_MODEL**0.5)
    wo = nn.Parameter(torch.randn(EXPERTS, D_FF, D_MODEL) / D_FF**0.5)
    router = nn.Parameter(torch.randn(D_MODEL, EXPERTS) / D_MODEL**0.5)
    into, out = nn.Linear(D_MODEL, 2 * D_FF, bias=False), nn.Linear(2 * D_FF, D_MODEL, bias=False)
    dense = nn.Sequential(into, nn.ReLU(), out)

    def experts() -> torch.Tensor:
        gates, chosen = torch.topk(torch.softmax(x @ router, dim=-1), 2)
        gates = gates / gates.sum(dim=-1, keepdim=True)
        order = torch.argsort(chosen.flatten(), stable=True)
        token = order // 2
        counts = torch.bincount(chosen.flatten(), minlength=EXPERTS).tolist()
        inputs = enumerate(torch.split(x[token], counts))
        parts = [functional.relu(rows @ wi[expert]) @ wo[expert] for expert, rows in inputs]
        weighted = torch.cat(parts) * gates.flatten()[order, None]
        return torch.zeros_like(x).index_add(0, token, weighted)

    def once() -> None:
        y = dense(x) if kind == "torch_dense" else experts()
        leaves = [x, *dense.parameters()] if kind == "torch_dense" else [x, wi, wo, router]
        torch.autograd.grad((y * dy).sum(), leaves)

    return once, {"torch": torch.__version__, "threads": torch.get_num_threads()}


class Flags(ComparisonFlags):
    """Compares MoE layers with dense layers, and with MoE layers of another checkout."""

    rounds: Count = 9
    systems: Annotated[tuple[str, ...], Flag(choices=SYSTEMS)] = SYSTEMS
    passes: Count = 5
    """Passes per round."""


def benchmark(flags: Flags) -> None:
    """Measures the layers, and prints their times and costs."""
    if flags.worker is not None:
        system = torch if flags.worker.startswith("torch") else meshloom
        once, about = system(flags.worker)
        return rounds.serve_steps(about, lambda count: [once() for _ in range(count)], warmup=3)
    result, times = rounds.compare("moe", flags, flags.passes)
    for name in set(result) & set(flags.systems):
        dense = "torch_dense" if name.startswith("torch") else "dense"
        costs = [one[name] / one[dense] for one in times] if dense in times[0] else []
        result[name] |= {"cost": statistics.median(costs) if costs else None, "costs": costs}
    rounds.report(flags, result, times, passes=flags.passes)
