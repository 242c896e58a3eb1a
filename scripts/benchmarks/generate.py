"""Measures greedy decoding with a language model, as a share of the memory's bandwidth.

    meshloom bench generate --shape=1.3b --batch_sizes=1,32

Each new token reads all weights and the cache once, so that the bandwidth of the memory bounds the
speed.  The bandwidth is measured in the same session, by adding 1 to an array that no cache holds.
Weights are random, in the type of products; a text is as long as the shape's rows at most.

    meshloom bench generate --samples=16 --prompt=512 --new_tokens=64

The Efficient Giant Models guide (section 3.2) prefills a prompt once, draws all its samples in one
flat buffer and ranks them by a suffix in one pass.  With --samples this is compared with a cache
for each sample, filled from the same prefill, and with samples that share nothing: each prefills
the prompt itself.  All make the same number of tokens, in alternating rounds of one process.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from scripts.benchmarks.language_model import SHAPES, Shape, transformer
from scripts.benchmarks.rounds import Count, JsonFlags, best_seconds, ratio, seconds, show
from scripts.flag import Flag

if TYPE_CHECKING:
    from models.decoding.generate import DecodeInputs

SUFFIX = 16  # tokens
BYTES = 2**28
"""Size of the array that measures the bandwidth."""


def inputs_of(rows: int, prompt: int, new_tokens: int, suffix: int = 0) -> "DecodeInputs":
    """Returns prompts of this length, each to be continued by exactly this many tokens."""
    import jax.numpy as jnp

    from models.decoding.generate import DecodeInputs

    return DecodeInputs(
        prompts_BL=jnp.full((rows, prompt), 2, jnp.int32),
        prompt_lengths_B=jnp.full(rows, prompt, jnp.int32),
        seeds_B=jnp.arange(rows, dtype=jnp.uint32),
        max_new_tokens_B=jnp.full(rows, new_tokens, jnp.int32),
        min_new_tokens_B=jnp.full(rows, new_tokens, jnp.int32),
        suffix_L=jnp.arange(2, 2 + suffix) if suffix else None,
    )


def model_on_device(shape: Shape) -> tuple[Any, Any, Any]:
    """Returns a model with random weights, these, and a mesh of one device."""
    import jax

    from layouts.layout import Layout
    from layouts.mesh import make_mesh

    layout = Layout(mesh="data:1", rules="batch:data")
    on_cpu = jax.devices()[0].platform == "cpu"
    model = transformer(shape, store="float32" if on_cpu else "bfloat16").model(layout)
    mesh = make_mesh(layout)
    with jax.set_mesh(mesh):
        return model, jax.jit(model.init)(jax.random.key(0)), mesh


def measure(
    shape: Shape, batch_sizes: Sequence[int], prompt: int, new_tokens: int
) -> dict[str, Any]:
    """Returns the speed at each batch size, and the bytes a second that the device moves."""
    import jax
    import jax.numpy as jnp

    from models.decoding.generate import generate, initial_cache
    from models.decoding.sampling import Sampling
    from trainer.memory import shard_bytes

    model, params, mesh = model_on_device(shape)
    greedy = Sampling(temperature=0.0)
    array, add = jnp.zeros(BYTES // 4, jnp.float32), jax.jit(lambda array: array + 1)
    bytes_per_s = 2 * BYTES / best_seconds(lambda: add(array).block_until_ready())
    with jax.set_mesh(mesh):

        def run(rows: int, count: int) -> None:
            inputs = inputs_of(rows, prompt, count)
            generate(model, greedy, count, params, inputs).tokens_BWT.block_until_ready()

        def times(rows: int) -> dict[str, float]:
            warm_s = seconds(lambda: run(rows, new_tokens))
            # What the prompt takes is in both.
            token_s = (
                best_seconds(lambda: run(rows, new_tokens)) - best_seconds(lambda: run(rows, 1))
            ) / (new_tokens - 1)
            inputs = inputs_of(rows, prompt, new_tokens)
            cache = jax.eval_shape(lambda: initial_cache(model, greedy, new_tokens, params, inputs))
            read_bytes = shard_bytes(params) + shard_bytes(cache)
            return {
                "token_s": token_s,
                "tokens_per_s": rows / token_s,
                "bytes_a_token": read_bytes,
                "share_of_bandwidth": read_bytes / token_s / bytes_per_s,
                "warm_s": warm_s,
            }

        by_batch_size = {str(rows): times(rows) for rows in batch_sizes}
    return {
        "batch_sizes": by_batch_size,
        "weight_bytes": shard_bytes(params),
        "bandwidth_bytes_per_s": bytes_per_s,
        "prompt_tokens": prompt,
        "new_tokens": new_tokens,
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
    }


@dataclass(frozen=True, kw_only=True)
class Flags(JsonFlags):
    """Compares greedy decoding with the bandwidth of the memory."""

    shape: Annotated[str, Flag(choices=tuple(SHAPES))] = "small"
    """The model; its rows are not used."""
    batch_sizes: tuple[int, ...] = (1, 32)
    """Texts decoded together: numbers, separated by commas."""
    prompt: Count = 64
    """Tokens of each prompt."""
    new_tokens: Count = 128
    """New tokens of each text."""
    samples: Annotated[int | None, Flag(min=1)] = None
    """Compares this number of samples of one prompt in a flat buffer with separate ones instead."""
    rounds: Count = 5
    """With --samples: rounds to measure."""


def compare_samples(flags: Flags, samples: int) -> dict[str, Any]:
    """Compares the speed of samples, ranked by a suffix, that share a buffer, a prompt, nothing."""
    import jax

    from models.decoding.generate import generate
    from models.decoding.sampling import Sampling

    model, params, mesh = model_on_device(SHAPES[flags.shape])
    searches = {
        "flat": (1, Sampling(width=samples)),
        "apart": (1, Sampling(width=samples, flat=False)),
        "separate": (samples, Sampling()),
    }

    def decode(name: str) -> None:
        rows, search = searches[name]
        inputs = inputs_of(rows, flags.prompt, flags.new_tokens, SUFFIX)
        with jax.set_mesh(mesh):
            decoded = generate(model, search, flags.new_tokens, params, inputs)
            decoded.score_BW.block_until_ready()

    def measured() -> dict[str, float]:
        return {name: seconds(functools.partial(decode, name)) for name in searches}

    # The first round, which compiles, is not counted.
    times = [measured() for _ in range(flags.rounds + 1)]
    speeds = {name: ratio(times[1:], "flat", name) for name in ("apart", "separate")}
    return {"shape": flags.shape, "warm_s": times[0], "seconds": times[1:], "speed_of_flat": speeds}


def benchmark(flags: Flags) -> None:
    """Measures each batch size, or samples."""
    if flags.samples is not None:
        return show(compare_samples(flags, flags.samples), flags.json_file)
    result = measure(SHAPES[flags.shape], flags.batch_sizes, flags.prompt, flags.new_tokens)
    show({"shape": flags.shape, **result}, flags.json_file)
