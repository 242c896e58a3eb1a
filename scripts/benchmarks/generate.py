"""Measures greedy decoding with a language model, as a share of the memory bandwidth.

    meshloom bench generate --shape=1.3b --batch_sizes=1,32

Each new token reads all weights and the cache once, so that the memory bandwidth limits the speed.
The bandwidth is measured in the same session, by adding 1 to an array that is too large for caches.
Weights are random, in the dtype of computation.  A text is at most as long as the shape's rows.
"""

from typing import Annotated, Any

from scripts.benchmarks.language_model import SHAPES, transformer
from scripts.benchmarks.rounds import Count, JsonFlags, best_seconds, device_seconds, seconds, show
from scripts.flag import Flag

BYTES = 2**28
"""Size of the array that measures the memory bandwidth."""


class Flags(JsonFlags):
    """Compares the speed of greedy decoding with memory bandwidth."""

    shape: Annotated[str, Flag(choices=tuple(SHAPES))] = "small"
    """The model; its rows are not used."""
    batch_sizes: tuple[int, ...] = (1, 32)
    """Batch sizes to try, separated by commas."""
    prompt: Count = 64
    """Tokens per prompt."""
    new_tokens: Count = 128
    """New tokens per text."""


def measure(flags: Flags) -> dict[str, Any]:
    """Returns the speed at each batch size, and the device's memory bandwidth in bytes a second."""
    import jax
    import jax.numpy as jnp

    from layouts.layout import Layout
    from layouts.mesh import make_mesh
    from models.decoding.generate import DecodeInputs, generate, initial_cache
    from models.decoding.sampling import Sampling
    from trainer.memory import shard_bytes

    layout, new_tokens = Layout(mesh="data:1", rules="batch:data"), flags.new_tokens
    on_cpu = jax.devices()[0].platform == "cpu"
    spec = transformer(SHAPES[flags.shape], store="float32" if on_cpu else "bfloat16")
    model, greedy = spec.model(layout), Sampling(temperature=0.0)
    array, add = jnp.zeros(BYTES // 4, jnp.float32), jax.jit(lambda array: array + 1)
    bytes_per_s = 2 * BYTES / device_seconds(lambda: add(array), jax.block_until_ready)

    def inputs_of(rows: int, count: int) -> DecodeInputs:
        """Returns prompts, each to be continued with exactly this many tokens.

        The number is an argument of the program, which is compiled once for all numbers.
        """
        return DecodeInputs(
            prompts_BL=jnp.full((rows, flags.prompt), 2, jnp.int32),
            prompt_lengths_B=jnp.full(rows, flags.prompt, jnp.int32),
            seeds_B=jnp.arange(rows, dtype=jnp.uint32),
            max_new_tokens_B=jnp.full(rows, count, jnp.int32),
            min_new_tokens_B=jnp.full(rows, count, jnp.int32),
        )

    with jax.set_mesh(make_mesh(layout)):
        params = jax.jit(model.init)(jax.random.key(0))

        def run(rows: int, count: int) -> None:
            inputs = inputs_of(rows, count)
            generate(model, greedy, new_tokens, params, inputs).tokens_BWT.block_until_ready()

        def times(rows: int) -> dict[str, float]:
            warm_s = seconds(lambda: run(rows, new_tokens))
            whole_s = best_seconds(lambda: run(rows, new_tokens))
            prompt_s = best_seconds(lambda: run(rows, 1))  # the time of the prompt is in both
            token_s = (whole_s - prompt_s) / (new_tokens - 1)
            inputs = inputs_of(rows, new_tokens)
            cache = jax.eval_shape(lambda: initial_cache(model, greedy, new_tokens, params, inputs))
            read_bytes = shard_bytes(params) + shard_bytes(cache)
            return {
                "token_s": token_s,
                "tokens_per_s": rows / token_s,
                "bytes_a_token": read_bytes,
                "share_of_bandwidth": read_bytes / token_s / bytes_per_s,
                "warm_s": warm_s,
            }

        by_batch_size = {str(rows): times(rows) for rows in flags.batch_sizes}
    return {
        "shape": flags.shape,
        "batch_sizes": by_batch_size,
        "weight_bytes": shard_bytes(params),
        "bandwidth_bytes_per_s": bytes_per_s,
        "prompt_tokens": flags.prompt,
        "new_tokens": new_tokens,
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
    }


def benchmark(flags: Flags) -> None:
    """Measures the speed at each batch size."""
    show(measure(flags), flags.json_file)
