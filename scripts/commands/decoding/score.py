"""Runs `meshloom score`: scores texts."""

from scripts.commands.common import input_lines, open_output
from scripts.commands.decoding.flags import ScoreFlags
from scripts.commands.trained import batch_of, single_checkpoint, trained_models
from scripts.terminal import print_note, progress_bar
from trainer.decoding.score import score_lines
from trainer.traces import trace_score_step


def score_file(flags: ScoreFlags) -> None:
    """Scores each line: a text, or a source and a target with a tab between them."""
    lines = input_lines(flags.input)
    with (
        trained_models(flags.model, lambda run: [trace_score_step]) as models,
        progress_bar("score") as update,
    ):
        step = single_checkpoint(models.checkpoints, flags.model.checkpoint)
        trained = models.restore(step, flags.model.average)
        task, rows = trained.run.task, batch_of(trained, flags.batch_sequences)
        tabs = sum("\t" in line for line in lines)
        if tabs and not task.takes_pairs:
            print_note(f"{tabs} of {len(lines)} lines have tabs; {task.name} scores them as texts.")
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
    with open_output(flags.output) as file:
        file.write("log_likelihood\twords\ttokens\n")
        file.writelines(f"{s.log_likelihood:.6f}\t{s.words}\t{s.tokens}\n" for s in scores)
