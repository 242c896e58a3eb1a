"""Compares samples in one flat buffer with separate ones; a suffix ranks them.

    python -m scripts.benchmarks.studies.samples --samples=16 --prompt=512

The Efficient Giant Models guide (section 3.2) prefills a prompt once, draws all its samples in one
buffer and ranks them by a suffix in one pass.  The others are a cache for each sample, filled from
the same prefill, and samples that share nothing: each prefills the prompt itself.  All three make
the same number of tokens, in alternating rounds of one process.
"""

import dataclasses
import statistics
from collections.abc import Callable
from typing import Annotated, Any

import numpy as np

from scripts.benchmarks.generate import inputs_of, model_on_device
from scripts.benchmarks.language_model import SHAPES
from scripts.benchmarks.options import Count, JsonFlags
from scripts.benchmarks.rounds import ratio, seconds, show
from scripts.command_line import run_command
from scripts.flag import Flag

FLAT, APART, SEPARATE = "flat", "apart", "separate"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags(JsonFlags):
    """Compares samples in one flat buffer with separate ones."""

    shape: Annotated[str, Flag(choices=tuple(SHAPES))] = "small"
    """The model; its rows are not used."""
    samples: Count = 16
    """Samples of the prompt."""
    prompt: Count = 512
    """Tokens of the prompt."""
    new_tokens: Count = 64
    """New tokens of each sample."""
    suffix: Count = 16
    """Tokens of the suffix."""
    rounds: Count = 5
    """Rounds to measure."""


def runs_of(flags: Flags) -> dict[str, Callable[[], Any]]:
    """Returns what decodes one batch of samples in each way, compiled at its first call."""
    import jax
    import jax.numpy as jnp

    from models.decoding.generate import generate
    from models.decoding.sampling import Sampling

    model, params, mesh = model_on_device(SHAPES[flags.shape])

    def decode(rows: int, search: Sampling) -> None:
        inputs = dataclasses.replace(
            inputs_of(rows, flags.prompt, flags.new_tokens),
            seeds_B=jnp.arange(rows, dtype=jnp.uint32),
            suffix_L=jnp.asarray(np.arange(2, 2 + flags.suffix), jnp.int32),
        )
        with jax.set_mesh(mesh):
            decoded = generate(model, search, flags.new_tokens, params, None, inputs)
            decoded.score_BW.block_until_ready()

    return {
        FLAT: lambda: decode(1, Sampling(width=flags.samples)),
        APART: lambda: decode(1, Sampling(width=flags.samples, flat=False)),
        SEPARATE: lambda: decode(flags.samples, Sampling()),
    }


def study(flags: Flags) -> None:
    """Decodes in alternating rounds, and prints the speed of the flat buffer."""
    runs = runs_of(flags)
    warm_s = {name: seconds(run) for name, run in runs.items()}
    times = [{name: seconds(run) for name, run in runs.items()} for _ in range(flags.rounds)]
    result = {
        "shape": flags.shape,
        "seconds": {name: statistics.median(one[name] for one in times) for name in runs},
        "speed_of_flat": {name: ratio(times, FLAT, name) for name in runs if name != FLAT},
        "warm_s": warm_s,
    }
    show(result, flags.json_file)


if __name__ == "__main__":
    run_command(Flags, study)
