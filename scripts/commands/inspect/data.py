"""Runs `meshloom inspect data`: shows rows, their documents, and the steps that read them."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from configs.errors import UserError
from data.cache import Prepared
from data.packing.rows import read_rows
from data.task import Task
from scripts.commands.common import data_dir_of, settings_of, task_of, write_json
from scripts.commands.inspect.flags import InspectDataFlags
from scripts.terminal import print_note, print_table, progress_bar
from trainer.ledger import Ledger
from trainer.model_dir import ModelDir
from trainer.prepare import prepare
from trainer.resume.history import last_saved
from trainer.run import Run

MOST_DOCUMENTS = 1000
"""Documents whose rows and steps are listed."""
STEPS_SHOWN = 8
"""Steps of a row in a table; the JSON has all."""


def data(flags: InspectDataFlags) -> None:
    """Prints packed rows, or the steps that read documents, or how much of each part is read."""
    chosen = [name for name in ("document", "containing", "counts") if getattr(flags, name)]
    if len(chosen + ["step"] * (flags.step is not None and chosen != ["counts"])) > 1:
        raise UserError(f"--{chosen[0]}: goes with no --{[*chosen, 'step'][1]}.  Leave out one.")
    config, model_dir = settings_of(flags.settings), flags.settings.model_dir
    task, vocabs, content_hash = task_of(config), None, None
    if model_dir is not None:
        directory = ModelDir(model_dir)
        vocabs, content_hash = directory.vocabs(task), directory.content_hash
    data_dir = data_dir_of(flags.data_dir, model_dir)
    prepared = prepare(task, data_dir, vocabs=vocabs, content_hash=content_hash)
    legal = ["train"] if flags.counts or flags.step else list(prepared.splits)
    if flags.split not in legal:
        raise UserError(f"--split={flags.split}: no such split.  Legal: {', '.join(legal)}.")
    rows, ledger = prepared.splits[flags.split], None
    if legal == ["train"] or (chosen and flags.split == "train" and "Run.model" in config.bound):
        run = config.make(Run).with_steps(len(rows))
        ledger, last_step = Ledger.of(run, rows, model_dir), flags.step or run.total_steps
    if ledger is not None and flags.counts:
        show(flags, ledger.counts(last_step))
        print_note(f"These are the rows of steps 1 to {last_step:,}.")
        return
    if not chosen:
        ids = flags.rows if ledger is None else ledger.rows_of_step(last_step).tolist()
        if max(ids) >= len(rows):
            raise UserError(f"--rows: the split has rows 0 to {len(rows) - 1}, not {max(ids)}.")
        show(flags, [s for row in ids for s in segments_of_row(prepared, flags.split, row)])
        return
    segments = []
    for _, row, segment in pieces_of_documents(flags, task, prepared).tolist():
        segments.append(segments_of_row(prepared, flags.split, row)[segment - 1])
        if ledger is not None:
            segments[-1]["steps"] = list(ledger.steps_of_row(row, last_step))
    show(flags, segments)
    if model_dir is not None:
        print_note(f"The newest checkpoint of the run is of step {last_saved(model_dir):,}.")


def pieces_of_documents(flags: InspectDataFlags, task: Task, prepared: Prepared) -> np.ndarray:
    """Returns a line of (document, row, segment) for each piece of the chosen documents."""
    index = prepared.splits[flags.split].known_documents
    if flags.document is not None:
        documents = index.named(flags.document)
    else:
        documents = np.array(list(documents_containing(flags, task, prepared)), np.int64)
        print_note(f"{len(documents):,} documents contain the text.")
    if len(documents) > MOST_DOCUMENTS:
        print_note(f"Shows the first {MOST_DOCUMENTS:,} of {len(documents):,} documents.")
        documents = documents[:MOST_DOCUMENTS]
    pieces = index.pieces_of(documents)
    if len(missing := np.setdiff1d(documents, pieces[:, 0])):
        print_note(f"In no row, because they are longer: {', '.join(index.names(missing))}.")
    return pieces[np.argsort(pieces[:, 0], kind="stable")]


def documents_containing(flags: InspectDataFlags, task: Task, prepared: Prepared) -> Iterator[int]:
    text = flags.containing or ""
    with progress_bar("search") as progress:
        for number, example in enumerate(prepared.examples(task, flags.split, progress)):
            if any(text in x for x in ([example] if isinstance(example, str) else example)):
                yield number


def segments_of_row(prepared: Prepared, split: str, row: int) -> list[dict[str, Any]]:
    """Describes each segment of a row."""
    rows = prepared.splits[split]
    batch = rows.batch(np.array([row]))
    tokens_BL, segments_BL = read_rows(np.array([row]), rows.targets_BL, rows.segments_BL)
    names = rows.documents.names(rows.documents.of_row(row)) if rows.documents else []
    segments = []
    for segment in range(1, int(segments_BL.max()) + 1):
        ids = tokens_BL[segments_BL == segment]
        line: dict[str, Any] = {"row": row, "segment": segment}
        if names:
            line["document"] = names[segment - 1]
        if prepared.source_vocab is not None:
            sources = batch["inputs_BM"][batch["segments_BM"] == segment]
            line["source"] = prepared.source_vocab.decode(sources)
            line["source_tokens"] = len(sources)
            line["source_pieces"] = " ".join(prepared.source_vocab.pieces(sources))
        line["tokens"] = len(ids)
        line["text"] = prepared.vocab.text(ids)
        line["pieces"] = " ".join(prepared.vocab.pieces(ids))
        segments.append(line)
    return segments


def show(flags: InspectDataFlags, lines: Sequence[dict[str, Any]]) -> None:
    """Prints lines as a table, of numbers of steps the first."""
    hidden = ("pieces", "source_pieces", "source_tokens")
    names = [name for name in (lines[0] if lines else ()) if name not in hidden]
    print_table(names, [[shown(line[name]) for name in names] for line in lines])
    write_json(flags.json_file, lines)


def shown(value: object) -> object:
    """Shortens a list of steps.

    >>> shown([3, 8]), shown([*range(20)])
    ('3, 8', '0, 1, 2, 3, 4, 5, 6, 7, 12 more')
    """
    if not isinstance(value, list):
        return f"{value:.3f}" if isinstance(value, float) else value
    more = [f"{len(value) - STEPS_SHOWN:,} more"] if len(value) > STEPS_SHOWN else []
    return ", ".join([*map(str, value[:STEPS_SHOWN]), *more]) or "none"
