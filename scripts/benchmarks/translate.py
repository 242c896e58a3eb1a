"""Compares training of a translation model with Hugging Face's Marian, in alternating rounds.

    meshloom bench translate --json=bench.json

The random pairs have the lengths of Multi30k: sources as in test_2016_flickr, and targets 1.03 +-
0.175 times as long.  Meshloom packs the pairs into rows.  Marian gets batches of pairs sorted by
length, with at most as many padded target tokens as Meshloom's batch has positions.  A round trains
on all pairs once, and counts the target tokens without padding.
"""

from collections.abc import Callable, Iterator
from typing import Annotated

import numpy as np

from scripts.benchmarks import rounds
from scripts.benchmarks import tiny_transformer as tiny
from scripts.benchmarks.rounds import ComparisonFlags, Count
from scripts.benchmarks.train import TORCH_ADAMW, Trainer
from scripts.flag import Flag

SYSTEMS = ("meshloom", "huggingface")
ROWS, LENGTH, MICROBATCHES = 32, 64, 2
BATCH_TOKENS = ROWS * LENGTH
DROPOUT, SMOOTHING = 0.3, 0.1

Pairs = list[tuple[np.ndarray, np.ndarray]]
Epoch = Callable[[], object]  # trains on all pairs once, and waits for the last update


def pairs_of(count: int) -> Pairs:
    """Draws sources and targets, each with END, in random order."""
    rng = np.random.default_rng(0)
    sources = tiny.sources(count, rng)
    words = np.maximum(1, np.rint(rng.normal(1.03, 0.175, count) * [len(ids) for ids in sources]))
    pairs = [(ids, tiny.sentence(int(n), rng)) for ids, n in zip(sources, words, strict=True)]
    return [pairs[i] for i in rng.permutation(count)]


def meshloom(pairs: Pairs) -> tuple[Epoch, dict[str, object]]:
    """Returns the training step of `meshloom train`, on packed rows."""
    import jax

    from data.packing.pack import Packer, Side
    from data.packing.rows import NO_ROW, Counts, PairRows

    spec = tiny.transformer(dropout=DROPOUT, loss_chunks=2)
    trainer = Trainer(spec, ROWS, MICROBATCHES, SMOOTHING)
    # The sentences have an END; packing adds its own.
    sources, targets = ([ids[:-1] for ids in side] for side in zip(*pairs, strict=True))
    packer = Packer(Side(LENGTH), Side(LENGTH))
    packer.add(targets, sources)
    rows = PairRows(packer.finish().arrays, Counts())
    ids = np.full(-(-len(rows) // ROWS) * ROWS, NO_ROW)
    ids[: len(rows)] = np.arange(len(rows))

    def epoch() -> None:
        trainer.train(trainer.to_device(rows.batch(some)) for some in ids.reshape(-1, ROWS))

    fill = float(np.mean(rows.counted_BL))
    return epoch, {"jax": jax.__version__, "updates": len(ids) // ROWS, "fill": fill}


def marian(pairs: Pairs) -> tuple[Epoch, dict[str, object]]:
    """Returns Hugging Face's model in eager PyTorch, with fused AdamW and its attention kernel."""
    import torch
    from torch.nn import functional

    model, about = tiny.marian(
        rounds.cores(), dropout=DROPOUT, activation_dropout=DROPOUT, attention_dropout=0.0
    )
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), **TORCH_ADAMW)
    batches = list(sorted_batches(pairs))
    order = np.random.default_rng(1)

    def update(batch: Pairs) -> torch.Tensor:
        sides = zip(*batch, strict=True)
        source, target = (torch.from_numpy(tiny.padded(list(side))) for side in sides)
        inputs = functional.pad(target[:, :-1], (1, 0), value=tiny.PAD)
        logits = model(
            input_ids=source,
            attention_mask=(source != tiny.PAD).long(),
            decoder_input_ids=inputs,
            use_cache=False,
        ).logits
        loss = functional.cross_entropy(
            logits.flatten(0, 1), target.flatten(), ignore_index=tiny.PAD, label_smoothing=SMOOTHING
        )
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        return loss.detach()

    def epoch() -> None:
        for i in order.permutation(len(batches)):
            loss = update(batches[i])
        float(loss)

    places = sum(len(batch) * max(len(target) for _, target in batch) for batch in batches)
    fill = sum(len(target) for _, target in pairs) / places
    return epoch, {**about, "updates": len(batches), "fill": fill}


def sorted_batches(pairs: Pairs) -> Iterator[Pairs]:
    """Batches pairs of similar lengths, with at most BATCH_TOKENS padded target tokens."""
    batch: Pairs = []
    for pair in sorted(pairs, key=lambda pair: (len(pair[1]), len(pair[0]))):
        if batch and (len(batch) + 1) * len(pair[1]) > BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(pair)
    yield batch


class Flags(ComparisonFlags):
    """Compares training speed with Hugging Face's Marian, or with another checkout."""

    rounds: Count = 7
    systems: Annotated[tuple[str, ...], Flag(choices=SYSTEMS)] = SYSTEMS
    pairs: Count = 2000
    """Pairs per round."""


def benchmark(flags: Flags) -> None:
    """Trains in alternating rounds, and prints the speeds."""
    pairs = pairs_of(flags.pairs)
    if flags.worker is not None:
        epoch, about = meshloom(pairs) if flags.worker == "meshloom" else marian(pairs)
        epoch()
        return rounds.serve(about, lambda question: rounds.seconds(epoch))
    result, times = rounds.compare("translate", flags, "epoch", f"--pairs={flags.pairs}")
    tokens = sum(len(target) for _, target in pairs)
    for system in result.values():
        system["target_tokens_per_s"] = tokens / system["median_s"]
    if set(SYSTEMS) <= set(result):
        result |= rounds.ratio(times, *SYSTEMS)
    rounds.report(flags, result, times, pairs=flags.pairs, target_tokens=tokens)
