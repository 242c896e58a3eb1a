"""Runs `meshloom score` and `rescore`: scores texts, and ranks n-best lists by the scores."""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from configs.errors import UserError, brief
from configs.json_reader import read_json
from data.sources.pairs import Pair
from data.task import Task
from scripts.commands.common import input_lines, open_output
from scripts.commands.decoding.flags import RescoreFlags, ScoreFlags
from scripts.commands.trained import batch_of, single_checkpoint, trained_models
from scripts.terminal import print_note, progress_bar
from trainer.decoding.score import Score, score_lines
from trainer.traces import trace_score_step


def score_file(flags: ScoreFlags) -> None:
    """Scores each line, or each pair of a source and a target with a tab between."""
    lines = input_lines(flags.input)

    def lines_for(task: Task) -> Sequence[str]:
        tabs = sum("\t" in line for line in lines)
        if tabs and not task.takes_pairs:
            print_note(f"{tabs} of {len(lines)} lines have tabs; {task.name} scores them as texts.")
        return lines

    scores = scores_of(flags, lines_for)
    with open_output(flags.output) as file:
        file.write("log_likelihood\twords\ttokens\n")
        file.writelines(f"{s.log_likelihood:.6f}\t{s.words}\t{s.tokens}\n" for s in scores)


def scores_of(flags: ScoreFlags, lines_for: Callable[[Task], Sequence[str]]) -> list[Score]:
    """Scores the lines for the model's task with one checkpoint; warns of those too long."""
    with (
        trained_models(flags.model, lambda run: [trace_score_step]) as models,
        progress_bar("score") as update,
    ):
        step = single_checkpoint(models.checkpoints, flags.model.checkpoint)
        trained = models.restore(step, flags.model.average)
        task, rows = trained.run.task, batch_of(trained, flags.batch_sequences)
        lines = lines_for(task)
        scores = score_lines(trained, lines, rows, update, flags.tag)
    if too_long := sum(not score.tokens for score in scores):
        print_note(
            f"Warning: {too_long} of {len(lines)} pairs are longer than a row and have no score."
        )
    if cut := sum(score.pieces > 1 for score in scores):
        print_note(
            f"Warning: {cut} of {len(lines)} lines are longer than a row ({type(task).__name__}"
            f".length = {task.length} tokens) and scored in pieces, each without the ones before "
            "it.  Set a larger length with --gin_param to score them whole."
        )
    return scores


def rescore_file(flags: RescoreFlags) -> None:
    """Ranks the hypotheses of an n-best list again with the scores of another model."""
    entries = [_entry(number, line) for number, line in enumerate(input_lines(flags.input), 1)]
    pairs = [Pair(entry["source"], one["text"]) for entry in entries for one in entry["hypotheses"]]

    def lines_for(task: Task) -> list[str]:
        """Returns the pairs, or for a language model the texts, which begin with their prompts."""
        if not task.has_source and not task.has_answers:
            return [pair.target for pair in pairs]
        return ["\t".join(part.replace("\t", " ") for part in pair) for pair in pairs]

    scores = iter(scores_of(flags, lines_for))
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
        entry = read_json(line, dict[str, Any], "line")
        for one in entry["hypotheses"]:
            one["text"], one["log_probability"] = str(one["text"]), float(one["log_probability"])
        entry["source"] = str(entry["source"])
        return entry
    except (ValueError, TypeError, KeyError):
        raise UserError(
            f"line {number}: not an n-best entry, a source and hypotheses with text and "
            f"log_probability: {brief(line)!r}.  Make the list with: meshloom decode --nbest=4 "
            "--format=jsonl."
        ) from None
