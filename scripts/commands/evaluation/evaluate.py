"""Runs `meshloom evaluate`: computes loss, perplexities and metrics of translations."""

import dataclasses
import functools
import os
import re
import shlex
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from configs.errors import UserError, extra_required
from configs.paths import path_of
from data.packing.rows import Rows, packed_pairs
from data.sources.pairs import Pair, chosen_tag
from data.sources.text import TextFiles
from data.sources.text_files import read_lines, read_raw_lines
from data.storage.files import is_stream
from data.task import Task
from models.loss import Criterion
from scripts.commands.common import STREAMS, data_dir_of, open_output, write_json
from scripts.commands.decoding.decode import decoder_of, trace_fns_of
from scripts.commands.evaluation.flags import EvaluateFlags, TextFlags
from scripts.commands.shared_flags import SearchFlags
from scripts.commands.trained import batch_of, trained_models
from scripts.flag import given_flags
from scripts.terminal import print_note, print_table, progress_bar
from trainer.checkpoints.restore import ModelRestorer, TrainedModel, chosen_steps
from trainer.checks import TraceFn
from trainer.evaluate import Evaluation, evaluate
from trainer.prepare import prepare
from trainer.run import Run
from trainer.traces import trace_evaluate_step
from trainer.translation import evaluate as translation
from trainer.translation.metrics import check_settings, check_texts, read_test_set

SPLIT = "validation"


def check_text(flags: EvaluateFlags, task: Task) -> None:
    """Refuses two texts, and flags of translations for a task without translations."""
    text, given = flags.text, given_flags(flags.text)
    for name, value in (("--input", text.text_file), ("--test_set", text.test_set)):
        if text.split is not None and value is not None:
            raise UserError(f"{name}={value} with --split={text.split}.  Remove one of them.")
    if task.has_rejected and text.split == "train":
        raise UserError(
            "--split=train: half of its answers are rejected ones.  Legal: another split, or "
            "--input=FILE; `meshloom score` scores single answers."
        )
    written = re.escape(flags.hypotheses or "") + r"(\.(source|reference\d*|lines))?"
    for read in filter(None, (text.text_file, *text.references)):
        if flags.hypotheses is not None and re.fullmatch(written, read):
            raise UserError(
                f"--hypotheses={flags.hypotheses}: {read} is also an input.  Choose another file."
            )
    if task.translates:
        if flags.hypotheses is not None and flags.sentences == 0:
            raise UserError("--hypotheses with --sentences=0, which translates none: remove one.")
        return
    if names := [name for name in given if name not in ("--split", "--input")]:
        raise UserError(
            f"{', '.join(names)}: {task.name} is not a translation task.  "
            "Evaluate it on --split or --input."
        )
    names = [*given_flags(flags.search), *given_flags(flags.metrics)]
    names += [name for name in ("--sentences", "--hypotheses") if getattr(flags, name[2:])]
    if names:
        raise UserError(
            f"{', '.join(names)}: {task.name} is not a translation task.  Remove it, or score "
            "generated answers with --harness=TASK."
        )


def given_text(flags: TextFlags, task: Task) -> translation.EvaluationSet | None:
    """Returns the sources and references that the flags name; None for a split of the task."""
    if flags.test_set is not None and flags.languages is not None:
        name = f"{flags.test_set} {flags.languages}"
        sources, references = read_test_set(flags.test_set, flags.languages)
    elif flags.text_file is not None and flags.references:
        name, sources = flags.text_file, list(read_lines(flags.text_file))
        references = [list(read_lines(path)) for path in flags.references]
    elif any((flags.test_set, flags.languages, flags.text_file, flags.references)):
        raise UserError(
            "A translation is evaluated on --input=SOURCES with --references=FILE, on "
            "--test_set=NAME with --languages=SRC-TGT, or on --split."
        )
    else:
        return None
    check_texts(name, sources, references)
    tag = chosen_tag(flags.tag, task.tags)
    return translation.EvaluationSet.whole(name, tag, sources, references)


def evaluate_model(flags: EvaluateFlags) -> list[dict[str, Any]]:
    """Evaluates checkpoints on a text; for a translation task, also evaluates translations.

    With --harness, scores tasks of lm-evaluation-harness instead.
    """
    if flags.harness.harness is not None:
        os.environ.setdefault("TQDM_DISABLE", "1")  # this command has a progress bar of its own
        with extra_required("harness", "--harness"):
            from scripts.commands.evaluation.harness import evaluate_harness

        return evaluate_harness(flags)
    if of_harness := given_flags(flags.harness):
        raise UserError(f"{', '.join(of_harness)} has no effect without --harness=TASK.  Add it.")
    check_settings(flags.metrics.tokenize, flags.text.languages)
    criterion = Criterion(logit_scale=flags.logit_scale, drop_tokens=flags.drop_tokens)
    search = SearchFlags(**dataclasses.asdict(flags.search))

    def trace_fns(run: Run) -> list[TraceFn]:
        decoding = trace_fns_of(search)(run) if run.task.translates else []
        return [functools.partial(trace_evaluate_step, criterion=criterion), *decoding]

    with trained_models(flags.model, trace_fns, drop_tokens=flags.drop_tokens) as models:
        steps = chosen_steps(models.checkpoints, flags.model.checkpoint)
        if flags.hypotheses is not None and len(steps) > 1:
            raise UserError(
                f"--hypotheses={flags.hypotheses} with {len(steps)} checkpoints, but it holds the "
                "translations of one.  Choose one --checkpoint."
            )
        task = models.run.task
        check_text(flags, task)
        given = given_text(flags.text, task) if task.translates else None
        data_dir = data_dir_of(flags.data_dir, flags.model.model_dir)
        rows, train_pairs = evaluation_rows(models, data_dir, flags.text, given)
        if left_out := rows.counts.left_out:
            lengths = ", ".join(f"{name} {length}" for name, length in task.row_lengths.items())
            others = ", the translations do not" * task.translates
            print_note(
                f"{left_out:,} of {rows.counts.lines + left_out:,} examples do not fit a row "
                f"({lengths}): the loss leaves them out{others}."
            )
        to_translate = list[translation.EvaluationSet]()
        if task.translates and flags.sentences != 0:
            split = flags.text.split or SPLIT
            to_translate = [given] if given else translation.evaluation_sets(task, split)
            if flags.sentences is not None:
                to_translate = translation.subset(to_translate, flags.sentences)
        lines = []
        for step in steps:
            trained = models.restore(step, flags.model.average)
            with progress_bar("evaluate") as update:
                evaluation, parts = evaluate(
                    trained.model, trained.params, rows, trained.mesh,
                    batch_sequences=batch_of(trained, flags.batch_sequences),
                    criterion=criterion, progress=update,
                )  # fmt: skip
            line: dict[str, Any] = {
                "step": trained.step,
                "averaged_steps": trained.averaged_steps,
                "average": flags.model.average,
                **evaluation.numbers(),
                "left_out_pairs": rows.counts.left_out if task.takes_pairs else None,
                "drop_tokens": flags.drop_tokens and models.run.model.drops_tokens,
            }
            if to_translate:
                line |= translation_numbers(trained, to_translate, flags, parts, train_pairs)
            lines.append(line | ({"parts": parts} if parts else {}))
    names = ["step", *evaluation.numbers()]
    numbers = [[line[name] for name in names] for line in lines]
    print_table(names, [[n if isinstance(n, int) else f"{n:.4f}" for n in row] for row in numbers])
    note_counting(flags, models.run, evaluation)
    write_json(flags.json_file, lines if len(steps) > 1 else lines[0])
    return lines


def note_counting(flags: EvaluateFlags, run: Run, evaluation: Evaluation) -> None:
    """Prints what a perplexity per word counts, and whether experts drop tokens."""
    if not run.task.takes_pairs:
        ends, source = "lines, blank ones too", run.task.source
        if flags.text.text_file is None and getattr(source, "example", "") != "any line":
            by_line = '; a blank line is one only with TextFiles.example = "any line"'
            ends = f"examples{by_line if isinstance(source, TextFiles) else ''}"
        counted = f"{evaluation.words:,} words and the ends of {evaluation.lines:,} {ends}"
        print_note(f"Perplexity per word counts {counted}.")
    if run.model.drops_tokens and flags.drop_tokens:
        print(
            "Experts drop the tokens beyond their evaluation capacity, as validation during "
            "training does; --no_drop evaluates as `decode` and `score` do."
        )
    elif run.model.drops_tokens:
        print("Experts drop no tokens, as in `decode` and `score`.")


def translation_numbers(
    trained: TrainedModel,
    sets: list[translation.EvaluationSet],
    flags: EvaluateFlags,
    parts: dict[str, dict[str, Any]],
    train_pairs: Mapping[str, int],
) -> dict[str, Any]:
    """Translates, prints and measures; adds the metrics of each part to its numbers in `parts`."""
    decoder = decoder_of([trained], SearchFlags(**dataclasses.asdict(flags.search)), None)
    with progress_bar("translate") as update:
        made = translation.translate(
            decoder, sets, update,
            test_set=flags.text.test_set, languages=flags.text.languages,
            **dataclasses.asdict(flags.metrics),
        )  # fmt: skip
    whole, *of_parts = made
    for one in of_parts:
        of_part = {"train_pairs": train_pairs.get(one.part.name)}
        parts.setdefault(one.part.name, {}).update(one.metrics.as_dict() | of_part)
    subset_of = "" if flags.sentences is None else " (a subset)"
    for one in made:
        print(f"{one.part.name}{subset_of}: {one.metrics}")
    numbers = whole.metrics.as_dict()
    if of_parts:
        numbers["mean_bleu"] = statistics.fmean(one.metrics.bleu.score for one in of_parts)
        print(f"BLEU of the {len(of_parts)} parts, averaged: {numbers['mean_bleu']:.2f}")
    write_hypotheses(flags, made)
    return numbers | {"is_subset": flags.sentences is not None}


def evaluation_rows(
    models: ModelRestorer, data_dir: Path, text: TextFlags, given: translation.EvaluationSet | None
) -> tuple[Rows, dict[str, int]]:
    """Returns the rows of a split of the model's task, or of files, with the model's vocabularies.

    Also returns the number of training pairs of each part of the task.
    """
    task, vocabs = models.run.task, models.vocabs
    if given is not None:
        pairs = [Pair(*pair) for pair in zip(given.sources, given.references[0], strict=True)]
        lengths = task.length, task.row_lengths["source_length"]
        packed, counts = packed_pairs(pairs, vocabs, lengths, True, given.tag)
        return task.rows(packed.arrays, counts, vocabs, pieces=packed.pieces), {}
    if text.text_file is not None:
        of_file = task.rows_of_text(read_raw_lines(text.text_file), vocabs)
        if not len(of_file):
            raise UserError(f"--input={text.text_file}: the file is empty.")
        return of_file, {}
    splits = prepare(task, data_dir, vocabs=vocabs, content_hash=models.content_hash).splits
    split = text.split or SPLIT
    if split not in splits:
        raise UserError(f"--split={split}: not in task {task.name}.  Legal: {', '.join(splits)}.")
    return splits[split], {part.name: part.counts.lines for part in splits["train"].parts}


def write_hypotheses(flags: EvaluateFlags, made: Sequence[translation.TranslatedSet]) -> None:
    """Writes translations; to a file, also writes their sources, references and line numbers."""
    if (path := flags.hypotheses) is None:
        return
    files = made[0].files()
    if path in STREAMS or is_stream(path_of(path)):
        files = {"": files[""]}
    for end, lines in files.items():
        with open_output(path + end) as file:
            file.writelines(f"{line}\n" for line in lines)
    if len(files) > 1:
        references = [path + end for end in files if end.startswith(".reference")]
        command = ["sacrebleu", *references, "--input", path]
        for name, value in (
            ("--tokenize", flags.metrics.tokenize), ("--language-pair", flags.text.languages)
        ):  # fmt: skip
            command += [] if value is None else [name, value]
        print_note(f"Wrote {', '.join(path + end for end in files)}.")
        print_note(f"The same BLEU: {shlex.join(command)}")
