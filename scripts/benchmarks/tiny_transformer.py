"""Defines Transformer-Tiny and sentence lengths, which the translation benchmarks share.

The model is that of configs/models/transformer_tiny.gin, with 10,000 tied words and random weights.
"""

import dataclasses
import importlib
from typing import TYPE_CHECKING, Any

import numpy as np

from configs.imports import CHECKOUT

if TYPE_CHECKING:
    from models.transformer import Transformer

LAYERS, D_MODEL, D_FF, HEADS, VOCAB = 4, 128, 256, 4, 10_000
PAD, END, FIRST_WORD = 0, 1, 2
# The number of English sentences in test_2016_flickr with 5, 6, ... of 10,000 joint sub-words.
SENTENCES_BY_LENGTH = [
    2, 3, 21, 37, 77, 81, 105, 115, 95, 91, 82, 62, 52, 36, 42, 16, 16, 13, 11, 12, 6, 3, 2, 5, 3,
    5, 4, 1, 2,
]  # fmt: skip
SHORTEST = 5


def sources(count: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Draws sentences of words and END, the shortest first, spread over all lengths."""
    lengths = np.repeat(np.arange(len(SENTENCES_BY_LENGTH)) + SHORTEST, SENTENCES_BY_LENGTH)
    chosen = lengths[np.linspace(0, len(lengths) - 1, count).astype(int)]
    return [sentence(int(length), rng) for length in chosen]


def sentence(words: int, rng: np.random.Generator) -> np.ndarray:
    return np.append(rng.integers(FIRST_WORD, VOCAB, words), END)


def transformer(**settings: Any) -> "Transformer":
    """Returns Meshloom's model from the gin file, with some settings changed."""
    from configs.load import load
    from models.transformer import Transformer
    from trainer.run import Run as Run  # the file names it

    file = CHECKOUT / "configs" / "models" / "transformer_tiny.gin"
    return dataclasses.replace(load([str(file)]).make(Transformer), **settings)


def marian(threads: int, **settings: Any) -> tuple[Any, dict[str, object]]:
    """Returns Hugging Face's model in PyTorch, and a description of it."""
    torch = importlib.import_module("torch")
    transformers = importlib.import_module("transformers")  # mypy does not know it: not in the lock
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    config = transformers.MarianConfig(
        vocab_size=VOCAB, d_model=D_MODEL, activation_function="relu",
        encoder_layers=LAYERS, encoder_attention_heads=HEADS, encoder_ffn_dim=D_FF,
        decoder_layers=LAYERS, decoder_attention_heads=HEADS, decoder_ffn_dim=D_FF,
        scale_embedding=True, init_std=D_MODEL**-0.5,
        pad_token_id=PAD, decoder_start_token_id=PAD, eos_token_id=END, forced_eos_token_id=END,
        **settings,
    )  # fmt: skip
    model = transformers.MarianMTModel(config)
    return model, {
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "threads": threads,
        "attention": model.config._attn_implementation,
    }


def padded(sentences: list[np.ndarray]) -> np.ndarray:
    """Joins sentences into one array, with PAD after the end of shorter ones."""
    length = max(map(len, sentences))
    return np.stack([np.pad(ids, (0, length - len(ids)), constant_values=PAD) for ids in sentences])
