"""Compares translation speed with Hugging Face and CTranslate2, in alternating rounds.

    meshloom bench decode --json=bench.json

Speed must not depend on the output of random weights.  So for each sentence, every system generates
the same number of tokens: the length of the source, rounded up to a multiple of 4.  The other
systems get batches of equal lengths, so that no sentence waits for a longer one; Meshloom makes its
own batches, of few shapes.  Each system runs with its best batch size of a few.  A first pass,
which compiles, is reported (warm_s).
"""

import importlib
import itertools
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NamedTuple

import numpy as np

from scripts.benchmarks import rounds
from scripts.benchmarks import tiny_transformer as tiny
from scripts.benchmarks.rounds import ComparisonFlags, Count
from scripts.benchmarks.tiny_transformer import D_FF, D_MODEL, HEADS, LAYERS, VOCAB
from scripts.flag import Flag

WIDTH = 5
MULTIPLE = 4  # numbers of tokens are rounded up to a multiple of this


class Text(NamedTuple):
    """Holds the tokens of a source, with END, and the number of tokens of its translation."""

    source: np.ndarray
    tokens: int


Translate = Callable[[Sequence[Text], int], int]  # given a batch size, returns the number of tokens


def batches(texts: Sequence[Text], batch_sequences: int) -> list[list[Text]]:
    """Batches sources of equal lengths: at most `batch_sequences` each, evenly filled."""
    made = []
    for _, group in itertools.groupby(texts, key=lambda text: text.tokens):
        same = list(group)
        bounds = np.linspace(0, len(same), -(-len(same) // batch_sequences) + 1).astype(int)
        made += [same[first:last] for first, last in itertools.pairwise(bounds.tolist())]
    return made


def meshloom() -> tuple[Translate, dict[str, object]]:
    """Decodes like `meshloom decode --simulate_devices=2`, with one device per core."""
    import jax

    from layouts.layout import Layout
    from layouts.mesh import make_mesh, simulate_devices
    from models.attention.multi_head import MultiHead
    from models.decoding.beam import Beam
    from trainer.decoding.decoder import Decoder, Request

    # The operations of one step are too small to split: each core processes rows of its own.
    simulate_devices(rounds.cores())
    layout = Layout(mesh="data:-1", rules="batch:data")
    mesh, model = make_mesh(layout), tiny.transformer(attention=MultiHead()).model(layout)
    with jax.set_mesh(mesh):
        params = jax.jit(model.init)(jax.random.key(0))

    def translate(texts: Sequence[Text], batch_sequences: int) -> int:
        decoder = Decoder(model, params, mesh, Beam(width=WIDTH), batch_sequences)
        requests = [
            Request([], max_new_tokens=text.tokens, min_new_tokens=text.tokens, source=text.source)
            for text in texts
        ]
        answered = itertools.chain.from_iterable(decoder.decode(requests))
        return sum(len(best.tokens) for _, (best, *_) in answered)

    about = {"device": jax.devices()[0].device_kind, "devices": len(jax.devices())}
    return translate, {"jax": jax.__version__, **about}


def huggingface(threads: int) -> tuple[Translate, dict[str, object]]:
    """Runs `generate` of Hugging Face's Marian model, with its key-value cache."""
    import torch

    model, about = tiny.marian(threads)
    model.eval()

    def translate_batch(texts: Sequence[Text]) -> int:
        tokens = texts[0].tokens
        ids = torch.from_numpy(tiny.padded([text.source for text in texts]))
        with torch.inference_mode():
            generated = model.generate(
                input_ids=ids,
                attention_mask=(ids != tiny.PAD).long(),
                num_beams=WIDTH,
                do_sample=False,
                use_cache=True,
                min_new_tokens=tokens,
                max_new_tokens=tokens,
            )
        return generated.shape[0] * (generated.shape[1] - 1)  # the first is decoder_start_token_id

    def translate(texts: Sequence[Text], batch_sequences: int) -> int:
        return sum(map(translate_batch, batches(texts, batch_sequences)))

    return translate, about


def ctranslate2() -> tuple[Translate, dict[str, object]]:
    """Runs CTranslate2 in float32, with one batch on each core."""
    ctranslate2 = importlib.import_module("ctranslate2")
    spec = ctranslate2.specs.TransformerSpec.from_config((LAYERS, LAYERS), HEADS)
    fill(spec)
    vocab = ["<s>", "</s>", *[f"w{number}" for number in range(VOCAB - 3)], "<unk>"]
    spec.register_source_vocabulary(vocab)
    spec.register_target_vocabulary(vocab)
    spec.validate()
    with tempfile.TemporaryDirectory() as folder:
        spec.save(folder)
        translator = ctranslate2.Translator(
            folder, "cpu", compute_type="float32", inter_threads=rounds.cores(), intra_threads=1
        )

    def start(texts: Sequence[Text]) -> list[Any]:
        return translator.translate_batch(
            [[vocab[token] for token in text.source] for text in texts],
            beam_size=WIDTH,
            min_decoding_length=texts[0].tokens,
            max_decoding_length=texts[0].tokens,
            asynchronous=True,
        )

    def translate(texts: Sequence[Text], batch_sequences: int) -> int:
        running = [start(batch) for batch in batches(texts, batch_sequences)]
        return sum(len(text.result().hypotheses[0]) for batch in running for text in batch)

    return translate, {"ctranslate2": ctranslate2.__version__, "translators": rounds.cores()}


def fill(spec: Any) -> None:
    """Sets all weights of a CTranslate2 model to random values."""
    rng = np.random.default_rng(0)
    rows = {
        "self_attention/linear_0": 3 * D_MODEL,
        "/attention/linear_1": 2 * D_MODEL,
        "ffn/linear_0": D_FF,
        "embeddings": VOCAB,
        "projection": VOCAB,
    }

    def set_weight(owner: Any, path: str, value: object) -> None:
        name = path.rpartition("/")[2]
        if isinstance(value, str):  # an optional weight
            return
        if name in ("gamma", "beta"):
            setattr(owner, name, np.full(D_MODEL, name == "gamma", np.float32))
        elif name == "weight":
            out = next((rows[part] for part in rows if part in path), D_MODEL)
            into = D_FF if "ffn/linear_1" in path else D_MODEL
            setattr(owner, name, into**-0.5 * rng.standard_normal((out, into), np.float32))

    importlib.import_module("ctranslate2.specs.model_spec").visit_spec(spec, set_weight)
    spec.encoder.scale_embeddings = spec.decoder.scale_embeddings = True


SYSTEMS: dict[str, Callable[[], tuple[Translate, dict[str, object]]]] = {
    "meshloom": meshloom,
    # PyTorch on all cores, and on one, which is faster for so small a model on a busy machine.
    "huggingface": lambda: huggingface(rounds.cores()),
    "huggingface_one_thread": lambda: huggingface(1),
    "ctranslate2": ctranslate2,
}


class Flags(ComparisonFlags):
    """Compares translation speed with Hugging Face and CTranslate2, or with another checkout."""

    rounds: Count = 5
    sentences: Count = 1000
    """Sources to translate."""
    batch_sizes: tuple[int, ...] = (16, 32, 64, 128)
    """Batch sizes to try, separated by commas."""
    systems: Annotated[tuple[str, ...], Flag(choices=tuple(SYSTEMS))] = tuple(SYSTEMS)


def benchmark(flags: Flags) -> None:
    """Translates in alternating rounds; each system uses its best batch size."""
    if flags.worker is not None:
        translate, about = SYSTEMS[flags.worker]()
        sources = tiny.sources(flags.sentences, np.random.default_rng(0))
        texts = [Text(source, -(-len(source) // MULTIPLE) * MULTIPLE) for source in sources]
        tokens = sum(text.tokens for text in texts)

        def pass_s(batch_sequences: int) -> float:
            start_s = time.perf_counter()
            made = translate(texts, batch_sequences)
            seconds = time.perf_counter() - start_s
            # Some systems do not return a final END.
            assert tokens - len(texts) <= made <= tokens, f"{made} tokens instead of {tokens}"
            return seconds

        warm_s, sweep_s = ({size: pass_s(size) for size in flags.batch_sizes} for _ in range(2))
        best = min(sweep_s, key=sweep_s.__getitem__)
        about |= {"batch_sequences": best, "warm_s": warm_s, "sweep_s": sweep_s}
        return rounds.serve(about, lambda question: pass_s(best))
    sizes = ",".join(map(str, flags.batch_sizes))
    work = f"--sentences={flags.sentences}", f"--batch_sizes={sizes}"
    result, times = rounds.compare("decode", flags, "pass", *work)
    for system in result.values():
        system["sentences_per_s"] = flags.sentences / system["median_s"]
    first, *others = (name for name in flags.systems if name in result)
    result |= {f"to_{name}": rounds.ratio(times, first, name) for name in others}
    rounds.report(flags, result, times, sentences=flags.sentences)
