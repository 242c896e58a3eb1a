"""Runs `meshloom score`: computes log-likelihoods of given texts."""

from collections.abc import Callable, Sequence

from data.task import Task
from scripts.commands.common import input_lines, open_output
from scripts.commands.decoding.flags import ScoreFlags
from scripts.commands.shared_flags import CheckpointFlags
from scripts.commands.trained import batch_of, single_checkpoint, trained_models
from scripts.terminal import Bar, print_note
from trainer.decoding.score import Score, score_lines
from trainer.traces import trace_score_step


def score_file(flags: ScoreFlags) -> None:
    """Scores each line, or each pair of a source and a target with a tab between."""
    lines = input_lines(flags.input)
    scores = scores_of(lambda task: lines, flags.model, flags.batch_sequences, flags.tag)
    with open_output(flags.output) as file:
        file.write("log_likelihood\twords\ttokens\n")
        file.writelines(f"{s.log_likelihood:.6f}\t{s.words}\t{s.tokens}\n" for s in scores)


def scores_of(
    lines_for: Callable[[Task], Sequence[str]],
    model: CheckpointFlags,
    batch_sequences: int | None = None,
    tag: str | None = None,
) -> list[Score]:
    """Scores the lines for the model's task with one checkpoint; warns of those too long."""
    with trained_models(model, lambda run: [trace_score_step]) as models, Bar("score") as bar:
        trained = models.restore(
            single_checkpoint(models.checkpoints, model.checkpoint), model.average
        )
        task, vocabs, rows = trained.run.task, trained.vocabs, batch_of(trained, batch_sequences)
        lines = lines_for(task)
        scores = score_lines(
            trained.model, trained.params, lines, task, vocabs, trained.mesh, rows, bar.update, tag
        )
    too_long = sum(not score.tokens for score in scores)
    if too_long:
        print_note(
            f"Warning: {too_long} of {len(lines)} pairs are longer than a row and have no score."
        )
    cut = sum(score.pieces > 1 for score in scores)
    if cut:
        print_note(
            f"Warning: {cut} of {len(lines)} lines are longer than a row ({type(task).__name__}"
            f".length = {task.length} tokens) and scored in pieces, each without the ones before "
            "it.  Set a larger length with --gin_param to score them whole."
        )
    return scores
