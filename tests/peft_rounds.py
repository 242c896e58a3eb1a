"""Compares steps with PyTorch and PEFT, of all weights and of adapters (docs/importing.md).

    python -m tests.peft_rounds --torch_python=PYTHON

PYTHON has torch, transformers and peft, which may need other versions than Meshloom does. One
process for each system trains the same Llama, in turn.
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

VOCAB, D_MODEL, D_FF, HEADS, LAYERS, ROWS, LENGTH = 8192, 512, 1408, 8, 4, 4, 256
RANK, ALPHA, RATE, BETAS, DECAY = 8, 16, 1e-3, (0.9, 0.98), 0.01
REFERENCE = "meshloom adapters"
SYSTEMS = (
    "meshloom all",
    REFERENCE,
    "torch all",
    "torch adapters",
    "compiled all",
    "compiled adapters",
)

Run = Callable[[int], object]  # trains a number of steps and waits for the last


def meshloom(adapters: bool, ids_BS: Any) -> tuple[Run, int]:
    """Returns Meshloom's steps, and the number of weights that they train."""
    import jax

    from models.adapters.lora import Lora
    from models.feed_forward.mlp import Mlp
    from models.positions.rotary import Rotary
    from models.transformer import Transformer
    from scripts.benchmarks.train import Trainer

    spec = Transformer(
        vocab=VOCAB,
        d_model=D_MODEL,
        d_ff=D_FF,
        heads=HEADS,
        d_kv=D_MODEL // HEADS,
        layers=LAYERS,
        length=LENGTH,
        positions=Rotary(),
        feed_forward=Mlp(gated=True),
        tied=False,
        adapter=Lora(rank=RANK, alpha=float(ALPHA), targets=("w*",)) if adapters else None,
    )
    trainer = Trainer(spec, ROWS, microbatches=ROWS)
    ids_BS = ids_BS.astype(np.int32)
    arrays = {
        "inputs_BL": ids_BS[:, :-1],
        "targets_BL": ids_BS[:, 1:],
        "segments_BL": np.ones((ROWS, LENGTH), np.int32),
        "positions_BL": np.tile(np.arange(LENGTH, dtype=np.int32), (ROWS, 1)),
    }
    batch = trainer.to_device(arrays)
    trained = trainer._step_spec.trained(trainer._state["params"])
    return lambda steps: trainer.train([batch] * steps), sum(
        x.size for x in jax.tree.leaves(trained)
    )


def torch(adapters: bool, ids_BS: Any, compiled: bool) -> tuple[Run, int]:
    """Returns the steps of transformers and PEFT, and the number of weights that they train."""
    import torch
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=D_MODEL,
        intermediate_size=D_FF,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        num_hidden_layers=LAYERS,
        max_position_embeddings=LENGTH,
        use_cache=False,
    )
    model: Any = transformers.LlamaForCausalLM(config)
    if adapters:
        import peft

        names = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
        lora = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=list(names))
        model = peft.get_peft_model(model, lora)
    model.train()
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RATE, betas=BETAS, weight_decay=DECAY, fused=True)
    forward = torch.compile(model) if compiled else model
    ids = torch.from_numpy(ids_BS)
    inputs, targets = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    def run(steps: int) -> None:
        for _ in range(steps):
            logits = forward(input_ids=inputs).logits
            loss = torch.nn.functional.cross_entropy(logits.view(-1, VOCAB), targets.view(-1))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()

    return run, sum(weight.numel() for weight in trained)


def work(system: str) -> None:
    """Trains as many steps as each line of stdin says, and prints what one takes."""
    name, weights = system.split()
    ids_BS = np.random.default_rng(0).integers(2, VOCAB, (ROWS, LENGTH + 1))
    make = meshloom if name == "meshloom" else torch
    options = () if name == "meshloom" else (name == "compiled",)
    run, trained = make(weights == "adapters", ids_BS, *options)
    run(2)
    print("ready", trained, flush=True)
    for line in sys.stdin:
        steps, start, start_cpu = int(line), time.perf_counter(), time.process_time()
        run(steps)
        wall_s, cpu_s = time.perf_counter() - start, time.process_time() - start_cpu
        peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
        print(wall_s / steps, cpu_s / steps, peak_mb, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--torch_python", default=sys.executable)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=4, help="of each system in a round")
    parser.add_argument("--worker", choices=SYSTEMS, help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.worker:
        return work(flags.worker)
    workers, rounds = {}, {system: [] for system in SYSTEMS}
    for system in SYSTEMS:
        python = sys.executable if system.startswith("meshloom") else flags.torch_python
        command = [python, "-m", "tests.peft_rounds", f"--worker={system}"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        workers[system] = subprocess.Popen(command, env=dict(os.environ, PYTHONPATH="."), **pipes)
        line = next((line for line in workers[system].stdout if line.startswith("ready")), None)
        if line is None:
            sys.exit(f"{system}: the process ended before its first step.")
        print(f"{system}: {int(line.split()[1]):,} weights trained", flush=True)
    for _ in range(flags.rounds):
        for system, worker in workers.items():
            print(flags.steps, file=worker.stdin, flush=True)
            rounds[system].append([float(number) for number in worker.stdout.readline().split()])
    print("| system | step | processor time | time over Meshloom's adapters | peak |")
    for system, measured in rounds.items():
        wall_s, cpu_s, peak_mb = (
            statistics.median(column) for column in zip(*measured, strict=True)
        )
        pairs = zip(measured, rounds[REFERENCE], strict=True)
        ratios = sorted(numbers[0] / reference[0] for numbers, reference in pairs)
        ratio = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        print(f"| {system} | {wall_s:.2f} s | {cpu_s:.2f} s | {ratio} | {peak_mb:,.0f} MB |")
    for worker in workers.values():
        worker.stdin.close()


if __name__ == "__main__":
    main()
