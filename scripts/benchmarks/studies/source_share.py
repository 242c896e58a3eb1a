"""Measures what translation models gain from the source, and what they know of the target.

    python -m scripts.benchmarks.studies.source_share --model_dir=runs/dense --model_dir=runs/moe

Each held-out target is scored with its own source and with a stranger's: the source of another pair
of the same part, whose target is about as long.  What the strangers' sources leave is what a model
knows of the target language; the difference is what the source tells it, in nats a token.  The
first model is the one that the others are compared with, with the standard error of the difference
over the pairs.  Models may come from several steps: runs/dense@700 is that checkpoint.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from configs.errors import UserError
from data.sources.pairs import Pair
from data.task import Task
from scripts.benchmarks.rounds import JsonFlags
from scripts.command_line import run_command
from scripts.commands.common import settings, task_of, write_json
from scripts.commands.decoding.score import scores_of
from scripts.commands.shared_flags import CheckpointFlags, Strings
from scripts.terminal import print_table

Columns = Sequence[np.ndarray]


@dataclass(frozen=True, kw_only=True)
class Flags(JsonFlags):
    """Measures what the source tells each model, and what they know without it."""

    model_dir: Strings
    """Model directory, with @STEP behind it for an older checkpoint. Repeat it."""
    split: str = "validation"
    """Split of the task."""


def study(flags: Flags) -> None:
    """Scores the pairs with each model, and prints a table."""
    models = flags.model_dir
    task = task_of(settings(checkpoint_of(models[0]).model_dir, (), ()))
    pairs = with_strangers(task, flags.split)
    scores = {name: scores_with_strangers(name, pairs) for name in models}
    scored = np.all([np.isfinite(x[0] + x[1]) for x in scores.values()], axis=0)
    kept = {name: [column[scored] for column in columns] for name, columns in scores.items()}
    figures = {name: compare_scores(columns, kept[models[0]]) for name, columns in kept.items()}
    rows = [[name, *(f"{x:.4f}" for x in figure.values())] for name, figure in figures.items()]
    print_table(["model", *(column.replace("_", " ") for column in figures[models[0]])], rows)
    write_json(flags.json_file, {"pairs": int(scored.sum()), "models": figures})


def checkpoint_of(name: str) -> CheckpointFlags:
    folder, _, step = name.partition("@")
    return CheckpointFlags(model_dir=Path(folder), checkpoint=step or "latest")


def with_strangers(task: Task, split: str) -> list[tuple[Pair, str]]:
    """Returns the pairs of a split, each with a source that is not its own."""
    if not task.has_source:
        raise UserError("--model_dir: a language model has no source.  Give translation models.")
    return [made for part in task.test_pairs(split) for made in strangers(part.pairs)]


def strangers(pairs: Sequence[Pair]) -> list[tuple[Pair, str]]:
    """Pairs each with the source of the next longer one that has other words on both sides.

    A pair that is longer than all others gets a shorter one's; one that has no other is left out.

    >>> [source for _, source in strangers([Pair("zwei Wege", "two ways"), Pair("eins", "one")])]
    ['zwei Wege', 'eins']
    """
    shuffled = random.Random(0).sample(pairs, len(pairs))  # neighbours in a file are often similar
    ordered = sorted(shuffled, key=lambda pair: len(pair.target.split()))
    made = []
    for at, pair in enumerate(ordered):
        for other in (*ordered[at + 1 :], *reversed(ordered[:at])):
            if other.source != pair.source and other.target != pair.target:
                made.append((pair, other.source))
                break
    return made


def scores_with_strangers(name: str, pairs: Sequence[tuple[Pair, str]]) -> Columns:
    """Scores each target with its own source and with the stranger's, in nats.

    Returns both log-likelihoods of each target, its tokens and its words.
    """
    paired = ["\t".join(pair) for pair, _ in pairs]
    stranger = [f"{source}\t{pair.target}" for pair, source in pairs]
    scores = scores_of(lambda task: [*paired, *stranger], checkpoint_of(name))
    nats = np.array([score.log_likelihood for score in scores])
    counts = [(s.tokens, s.words + 1) for s in scores[: len(paired)]]  # the end counts as a word
    return [nats[: len(paired)], nats[len(paired) :], *np.array(counts, np.float64).T]


def compare_scores(columns: Columns, baseline: Columns) -> dict[str, float]:
    paired, stranger, tokens, words = columns
    source_tells = paired - stranger
    more = source_tells - (baseline[0] - baseline[1])
    return {
        "perplexity_per_word": float(np.exp(-paired.sum() / words.sum())),
        "without_source": -float(stranger.sum() / tokens.sum()),
        "source_tells": float(source_tells.sum() / tokens.sum()),
        "difference": float(more.sum() / tokens.sum()),
        "standard_error": float(more.std() / len(more) ** 0.5 / tokens.mean()),
    }


if __name__ == "__main__":
    run_command(Flags, study)
