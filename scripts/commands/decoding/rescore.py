"""Runs `meshloom rescore`: reranks an n-best list with the scores of another model."""

import json
import math
from collections.abc import Iterator
from typing import Any

from configs.errors import UserError
from configs.json_reader import read_json
from data.sources.pairs import Pair
from data.task import Task
from scripts.commands.common import input_lines, open_output
from scripts.commands.decoding.flags import RescoreFlags
from scripts.commands.decoding.score import scores_of
from trainer.decoding.score import Score


def rescore_file(flags: RescoreFlags) -> None:
    """Ranks the hypotheses of an n-best list again with the scores of another model."""
    entries = [_entry(number, line) for number, line in enumerate(input_lines(flags.input), 1)]
    pairs = [Pair(entry["source"], one["text"]) for entry in entries for one in entry["hypotheses"]]

    def lines_for(task: Task) -> list[str]:
        """Returns the pairs, or for a language model the texts, which begin with their prompts."""
        if not task.has_source and not task.has_answers:
            return [pair.target for pair in pairs]
        return ["\t".join(part.replace("\t", " ") for part in pair) for pair in pairs]

    scores = iter(scores_of(lines_for, flags.model, flags.batch_sequences, flags.tag))
    with open_output(flags.output) as file:
        for entry in entries:
            ranked = rank(entry["hypotheses"], scores, flags.weight, flags.alpha)
            file.write(json.dumps(entry | {"hypotheses": ranked}, ensure_ascii=False) + "\n")


def rank(
    hypotheses: list[dict[str, Any]], scores: Iterator[Score], weight: float, alpha: float
) -> list[dict[str, Any]]:
    """Orders hypotheses by both models, given the next scores; last come those without one."""
    scored, unscored = [], []
    for one, score in zip(hypotheses, scores, strict=False):
        both = one["log_probability"] + weight * score.log_likelihood
        if math.isnan(both):  # longer than a row
            unscored.append({**one, "rescored": None})
        else:
            scored.append({**one, "rescored": both / ((5 + score.tokens) / 6) ** alpha})
    return [*sorted(scored, key=lambda one: one["rescored"], reverse=True), *unscored]


def _entry(number: int, line: str) -> dict[str, Any]:
    try:
        entry = read_json(line, dict[str, Any], "it")
        for one in entry["hypotheses"]:
            one["text"], one["log_probability"] = str(one["text"]), float(one["log_probability"])
        entry["source"] = str(entry["source"])
        return entry
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(
            f"line {number}: not an n-best entry ({type(error).__name__}: {error}).  Make the list "
            "with: meshloom decode --nbest=4 --format=jsonl."
        ) from None
