"""Continues lines of text: prompts to batches of few shapes, samples back to text in order."""

from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from configs.errors import UserError
from data.vocab import Vocab
from models.api import Model, Params
from models.decode import Asked, generate
from models.sampling import Sampling

SHORTEST = 8  # prompt lengths are rounded up to powers of two from here: few shapes to compile


def padded(length: int) -> int:
    """The shape that a prompt of this length is decoded in.

    >>> padded(3), padded(8), padded(9)
    (8, 8, 16)
    """
    return max(SHORTEST, 1 << (length - 1).bit_length()) if length else SHORTEST


def decode_lines(
    model: Model,
    params: Params,
    prompts: Sequence[str],
    vocab: Vocab,
    mesh: Mesh,
    sampling: Sampling,
    *,
    seed: int,
    batch_sequences: int,
    new_tokens: int,
    most_places: int | None,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> list[str]:
    """The continuation of each prompt, in order.

    What a prompt gets depends on the prompt, the seed and its line, not on its batch.
    """
    ids = vocab.encode(prompts)
    for line, prompt in enumerate(ids, 1):
        if most_places is not None and len(prompt) + 1 + new_tokens > most_places:
            raise UserError(
                f"line {line}: {len(prompt)} prompt tokens and {new_tokens} new ones do not fit in "
                f"the model's {most_places} learned positions.  Shorten it, or lower --max_tokens."
            )
    order = sorted(range(len(ids)), key=lambda line: (padded(len(ids[line])), line))
    texts = [""] * len(ids)
    done = 0
    while done < len(order):
        shape = padded(len(ids[order[done]]))
        batch = [
            line for line in order[done : done + batch_sequences] if padded(len(ids[line])) == shape
        ]
        tokens = _sample(
            model, params, mesh, sampling, new_tokens, seed, batch, ids, (batch_sequences, shape)
        )
        for line, row in zip(batch, tokens, strict=False):
            texts[line] = vocab.decode([*map(int, ids[line]), *row])
        done += len(batch)
        report(done, len(order))
    return texts


def _sample(
    model: Model,
    params: Params,
    mesh: Mesh,
    sampling: Sampling,
    new_tokens: int,
    seed: int,
    batch: Sequence[int],
    ids: Sequence[np.ndarray],
    shape: tuple[int, int],
) -> np.ndarray:
    """New tokens for some lines; the batch is filled up with empty prompts."""
    prompts_BL = np.zeros(shape, np.int32)
    lengths_B, seeds_B = np.zeros(shape[0], np.int32), np.zeros(shape[0], np.uint32)
    for row, line in enumerate(batch):
        prompts_BL[row, : len(ids[line])] = ids[line]
        lengths_B[row] = len(ids[line])
        seeds_B[row] = np.random.SeedSequence([seed, line]).generate_state(1)[0]

    def put(array: np.ndarray, axes: str) -> jax.Array:
        return jax.device_put(array, NamedSharding(mesh, model.layout.place(axes)))

    asked = Asked(
        prompts_BL=put(prompts_BL, "Bl"),
        lengths_B=put(lengths_B, "B"),
        seeds_B=put(seeds_B, "B"),
        most_B=put(np.full(shape[0], new_tokens, np.int32), "B"),
    )
    with jax.set_mesh(mesh):
        found = generate(model, sampling, new_tokens, params, None, asked)
    return np.asarray(found.tokens_BWT)[:, 0]
