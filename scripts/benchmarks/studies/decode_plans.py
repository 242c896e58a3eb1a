"""Plans the decoding of three shapes on three kinds of chips, at three batch sizes.

    python -m scripts.benchmarks.studies.decode_plans     (2 minutes)

By the trace alone, with the constants of layouts/cost/hardware.py: prompts of 512 tokens, 128 new
ones, greedily, weights and products in bfloat16.  Prints a table in Markdown.
"""

import functools
import itertools

from configs.load import load
from layouts.cost.interconnect import Topology
from models.decoding.sampling import Sampling
from scripts.commands.planning.inputs import PlanInputs
from trainer.memory import shard_bytes
from trainer.planning.decoding import DecodePlan, plan_decode_from_trace
from trainer.traces import DecodeShape

BATCHES = (1, 8, 64)
PROMPT_TOKENS, NEW_TOKENS = 512, 128
MODELS = {
    "1.3B": (
        "configs/models/llama3_8b.gin",
        "Transformer.layers = 24",
        "Transformer.d_model = 2048",
        "Transformer.d_ff = 5504",
        "Transformer.heads = 16",
        "Transformer.kv_heads = 16",
        "Transformer.vocab = 32000",
    ),
    "8B": ("configs/models/llama3_8b.gin",),
    "70B": ("configs/models/llama2_70b.gin",),
}
TOPOLOGIES = {
    "1.3B": ("v5e:1x1", "v6e:1x1", "h100:1x1"),
    "8B": ("v5e:2x2", "v6e:1x1", "h100:1x1"),
    "70B": ("v5e:4x4", "v6e:2x4", "h100:1x4"),
}
MAX_HEADS = 8  # devices over which key/value heads split; more split the rest of the weights
HEAD = (
    "| model | devices | layout | rows | memory per device | first token | token "
    "| least by memory | tokens/s |"
)


@functools.cache
def plan_of(model: str, topology_name: str, rows: int) -> DecodePlan:
    """Plans the decoding of a batch."""
    file, *settings = MODELS[model]
    topology = Topology.named(topology_name)
    mesh, rules = layout_of(topology.devices)
    settings += [
        "Precision.store = 'bfloat16'",
        f"Layout.mesh = '{mesh}'",
        f"Layout.rules = '{rules}'",
    ]
    inputs = PlanInputs.read(load([file], settings), topology)
    shape = DecodeShape(Sampling(temperature=0), rows, 0, PROMPT_TOKENS, NEW_TOKENS)
    return plan_decode_from_trace(inputs.run, inputs.layout, inputs.sizes, topology, shape)


def layout_of(devices: int) -> tuple[str, str]:
    """Returns mesh and rules that split the weights over the devices.

    >>> layout_of(16)
    ('model:8,wide:2', 'heads:model;d_ff:model;d_ff:wide;vocab:model;vocab:wide')
    """
    if devices <= MAX_HEADS:
        return f"model:{devices}", "heads:model;d_ff:model;vocab:model"
    rules = "heads:model;d_ff:model;d_ff:wide;vocab:model;vocab:wide"
    return f"model:{MAX_HEADS},wide:{devices // MAX_HEADS}", rules


def least_token_s(plan: DecodePlan) -> float:
    """Returns how long a device reads its cache and its weights, without the embedding."""
    assert plan.topology is not None
    read_bytes = plan.step.array_bytes["parameters"] + plan.step.array_bytes["cache"]
    read_bytes -= shard_bytes(plan.step.params["embed_VD"])
    return read_bytes / plan.topology.chip.memory_bandwidth


def row(model: str, topology: str, rows: int) -> str:
    """Plans a batch, and writes it as a row of the table."""
    plan = plan_of(model, topology, rows)
    assert plan.timings is not None and plan.token_s is not None
    cells = (
        model,
        topology,
        layout_of(plan.devices)[0],
        f"{rows}",
        f"{plan.memory.needed_bytes / 1e9:.1f} GB" + " (does not fit)" * (not plan.fits),
        f"{1e3 * plan.timings.prefill.step_s:.1f} ms",
        f"{1e3 * plan.token_s:.2f} ms",
        f"{1e3 * least_token_s(plan):.2f} ms",
        f"{plan.tokens_per_s:,.0f}",
    )
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Prints the table."""
    print(f"{HEAD}\n|{' --- |' * HEAD.count('| ')}")
    for model, topologies in TOPOLOGIES.items():
        for topology, rows in itertools.product(topologies, BATCHES):
            print(row(model, topology, rows), flush=True)


if __name__ == "__main__":
    main()
