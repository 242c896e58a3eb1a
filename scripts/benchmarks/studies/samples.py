"""Compares samples in one flat buffer with separate ones; a suffix ranks them.

    python -m scripts.benchmarks.studies.samples --samples=16 --prompt=512

The Efficient Giant Models guide (section 3.2) prefills a prompt once, draws all its samples in one
buffer and ranks them by a suffix in one pass.  The others are a cache for each sample, filled from
the same prefill, and samples that share nothing: each prefills the prompt itself.  All three make
the same number of tokens, in alternating rounds of one process.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import click
import numpy as np

from scripts.benchmarks.language_model import SHAPES, Shape, transformer
from scripts.benchmarks.options import count_option, json_option, rounds_option
from scripts.benchmarks.rounds import ratio, show

FLAT, APART, SEPARATE = "flat", "apart", "separate"


def runs_of(
    shape: Shape, samples: int, prompt: int, new_tokens: int, suffix: int
) -> dict[str, Callable[[], Any]]:
    """Returns what decodes one batch of samples in each way, compiled at its first call."""
    import jax
    import jax.numpy as jnp

    from layouts.layout import Layout
    from layouts.mesh import make_mesh
    from models.decoding.generate import DecodeInputs, generate
    from models.decoding.sampling import Sampling

    layout = Layout(mesh="data:1", rules="batch:data")
    on_cpu = jax.devices()[0].platform == "cpu"
    model = transformer(shape, store="float32" if on_cpu else "bfloat16").model(layout)
    mesh = make_mesh(layout)
    with jax.set_mesh(mesh):
        params = jax.jit(model.init)(jax.random.key(0))

    def decode(rows: int, search: Sampling) -> Any:
        inputs = DecodeInputs(
            prompts_BL=jnp.full((rows, prompt), 2, jnp.int32),
            prompt_lengths_B=jnp.full(rows, prompt, jnp.int32),
            seeds_B=jnp.arange(rows, dtype=jnp.uint32),
            max_new_tokens_B=jnp.full(rows, new_tokens, jnp.int32),
            min_new_tokens_B=jnp.full(rows, new_tokens, jnp.int32),
            suffix_L=jnp.asarray(np.arange(2, 2 + suffix), jnp.int32),
        )
        with jax.set_mesh(mesh):
            return generate(model, search, new_tokens, params, None, inputs).score_BW

    return {
        FLAT: lambda: decode(1, Sampling(width=samples)),
        APART: lambda: decode(1, Sampling(width=samples, flat=False)),
        SEPARATE: lambda: decode(samples, Sampling()),
    }


def seconds(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run().block_until_ready()
    return time.perf_counter() - start


@click.command()
@click.option("--shape", type=click.Choice(list(SHAPES)), default="small", show_default=True)
@count_option("--samples", default=16, help="Samples of the prompt.")
@count_option("--prompt", default=512, help="Tokens of the prompt.")
@count_option("--new_tokens", default=64, help="New tokens of each sample.")
@count_option("--suffix", default=16, help="Tokens of the suffix.")
@rounds_option(5)
@json_option()
def main(
    shape: str,
    samples: int,
    prompt: int,
    new_tokens: int,
    suffix: int,
    count: int,
    json_file: str | None,
) -> None:
    """Compares samples in one flat buffer with separate ones."""
    runs = runs_of(SHAPES[shape], samples, prompt, new_tokens, suffix)
    warm_s = {name: seconds(run) for name, run in runs.items()}
    times = [{name: seconds(run) for name, run in runs.items()} for _ in range(count)]
    show(
        {
            "shape": shape,
            "seconds": {name: statistics.median(one[name] for one in times) for name in runs},
            "speed_of_flat": {name: ratio(times, FLAT, name) for name in runs if name != FLAT},
            "warm_s": warm_s,
        },
        json_file,
    )


if __name__ == "__main__":
    main()
