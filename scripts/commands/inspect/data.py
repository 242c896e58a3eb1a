"""Runs `meshloom inspect data`: shows rows, their documents, and the steps that read them."""

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from configs.errors import UserError
from data.batch_sizes import BatchSizes, value_at
from data.cache import Prepared
from data.contamination import overlaps
from data.packing.rows import Rows, read_rows
from data.task import Task
from scripts.commands.common import data_dir_of, input_lines, settings_of, task_of, write_json
from scripts.commands.inspect.flags import InspectDataFlags
from scripts.flag import given_flags
from scripts.terminal import print_note, print_table, progress_bar
from scripts.texts import shortened
from trainer.model_dir import ModelDir
from trainer.prepare import prepare
from trainer.resume.history import last_saved, values_by_step
from trainer.run import MAX_STEPS, Run

TOGETHER = (["--step", "--counts"], ["--ngram", "--contamination"])
MOST_DOCUMENTS = 1000
"""Maximum number of documents whose rows and steps are listed."""
MOST_ITEMS, MOST_LINES = 8, 50
"""How much of a list, such as steps, and of a file's lines a table shows; the JSON has all."""
NOT_IN_TABLES = ("pieces", "source_pieces", "source_tokens")
Line = dict[str, Any]
Stages = tuple[tuple[int, int], ...]
MEASURES: dict[str, tuple[str, Callable[[Line], bool]]] = {
    "gpt3_dirty": ("an n-gram occurs (GPT-3: dirty)", lambda line: line["ngrams"] > 0),
    "palm": ("70% of the n-grams do (PaLM: contaminated)", lambda line: line["ngrams"] >= 0.7),
    "llama2_dirty": ("80% of the words do (Llama 2: dirty)", lambda line: line["words"] >= 0.8),
    "llama2_clean": ("less than 20% do (Llama 2: clean)", lambda line: line["words"] < 0.2),
}


def data(flags: InspectDataFlags) -> None:
    """Prints packed rows, the steps that read documents, what they read, or contaminated lines."""
    given = [x for x in given_flags(flags) if x not in ("--data_dir", "--split", "--json")]
    if (given[1:] and given not in TOGETHER) or given == ["--ngram"]:
        raise UserError(
            f"{', '.join(given)}: unclear what to show.  Give one of --rows, --step, --document, "
            "--containing, --counts and --contamination; --counts also accepts --step, "
            "--contamination accepts --ngram."
        )
    config, model_dir = settings_of(flags.settings), flags.settings.model_dir
    task, vocabs, content_hash = task_of(config), None, None
    if model_dir is not None:
        directory = ModelDir(model_dir)
        vocabs, content_hash = directory.vocabs(task), directory.content_hash
    data_dir = data_dir_of(flags.data_dir, model_dir)
    prepared = prepare(task, data_dir, vocabs=vocabs, content_hash=content_hash)
    needs_run = flags.counts or flags.step is not None
    legal = ["train"] if needs_run else list(prepared.splits)
    if flags.split not in legal:
        raise UserError(f"--split={flags.split}: no such split.  Legal: {', '.join(legal)}.")
    rows, ledger, last_step = prepared.splits[flags.split], None, 0
    if needs_run or ("Run.model" in config.bound and flags.split == "train"):
        run = config.make(Run).with_steps(len(rows))
        ledger, last_step = Ledger.of(run, rows, model_dir), flags.step or run.total_steps
    inspection = Inspection(flags, task, prepared, rows, ledger, last_step)
    getattr(inspection, f"show_{given[-1][2:] if given else 'rows'}")()


@dataclasses.dataclass(frozen=True)
class Ledger:
    """Computes the rows of each step of a run from its seed, its data and its settings.

    Steps count from 1, as in metrics.
    """

    rows: Rows
    seed: int
    periods: Sequence[tuple[int, int, BatchSizes, Rows, Stages]]
    """For the steps after the first number, up to the second: the batch sizes, all rows without the
    excluded documents, and the stages of row lengths."""

    @classmethod
    def of(cls, run: Run, rows: Rows, model_dir: Path | None = None) -> "Ledger":
        """Makes a ledger from a run's settings and, for earlier steps, those in its directory."""
        names = ("batch_sequences", "batch_stages", "exclude", "length_stages")
        values = values_by_step(model_dir, {f"Run.{name}": getattr(run, name) for name in names})
        stops = [*(step for step, _ in values[1:]), MAX_STEPS]
        periods = [
            (step, stop, BatchSizes(batch, batch_stages), rows.without(exclude), length_stages)
            for (step, now), stop in zip(values, stops, strict=True)
            for batch, batch_stages, exclude, length_stages in [now.values()]
        ]
        return cls(rows, run.seed, periods)

    def rows_of_step(self, step: int) -> tuple[np.ndarray, Rows]:
        """Returns the ids of the rows of a step, and the rows as the step reads them."""
        [(_, _, sizes, rows, stages)] = [x for x in self.periods if x[0] < step <= x[1]]
        rows = dataclasses.replace(rows, batch_length=value_at(step - 1, None, stages))
        return rows.order.rows_of_step(self.seed, step - 1, sizes), rows

    def steps_of_segment(self, row: int, segment: int, last_step: int) -> Iterator[int]:
        """Yields the steps up to last_step that read a segment, once for each time."""
        for first, stop, sizes, rows, _ in self.periods:
            span = first, min(stop, last_step)
            if segment in rows.segments_BL[np.array([row])]:
                steps = self.rows.order.steps_of_row(self.seed, row, sizes, *span)
                yield from (step + 1 for step in steps)

    def counts(self, last_step: int) -> list[dict[str, Any]]:
        """Counts the rows and epochs of each part that the steps up to last_step read."""
        names = [part.name for part in self.rows.parts] if self.rows.mix else ["all"]
        read = np.zeros(len(names), np.int64)
        for first, stop, sizes, *_ in self.periods:
            read += self.rows.order.drawn_before(self.seed, min(stop, last_step), sizes)
            read -= self.rows.order.drawn_before(self.seed, min(first, last_step), sizes)
        return [
            {"part": name, "rows": rows, "rows_read": count, "epochs": count / rows}
            for name, rows, count in zip(names, self.rows.order.rows, read.tolist(), strict=True)
        ]


@dataclasses.dataclass(frozen=True)
class Inspection:
    """Shows what the flags select from the rows of a split."""

    flags: InspectDataFlags
    task: Task
    prepared: Prepared
    rows: Rows
    ledger: Ledger | None
    """The ledger of a run that reads the split, if one is known."""
    last_step: int

    def show_rows(self) -> None:
        ids, count = self.flags.rows, len(self.rows)
        if max(ids) >= count:
            legal = f"rows 0 to {count - 1}, not {max(ids)}" if count else "no rows"
            raise UserError(f"--rows: the split has {legal}.")
        self._show([segment for row in ids for segment in self._segments(row, self.rows)])

    def show_step(self) -> None:
        """Shows the rows of a step, without the documents that are excluded."""
        assert self.ledger is not None
        ids, rows = self.ledger.rows_of_step(self.last_step)
        segments = [segment for row in ids.tolist() for segment in self._segments(row, rows)]
        self._show([segment for segment in segments if segment["tokens"]])
        there = {(s["row"], s["segment"]) for s in segments}
        read = {(s["row"], s["segment"]) for s in segments if s["tokens"]}
        if excluded := len(there - read):
            print_note(f"Run.exclude left out {excluded:,} of {len(there):,} segments.")

    def show_counts(self) -> None:
        """Shows how much of each part the steps up to last_step read."""
        assert self.ledger is not None
        print_note(f"Steps 1 to {self.last_step:,} read:")
        self._show(self.ledger.counts(self.last_step))

    def show_document(self) -> None:
        self._show_documents(self.rows.known_documents.named(self.flags.document or ""))

    def show_containing(self) -> None:
        """Shows the documents that contain a text; of a pair, in either half."""
        texts, wanted = enumerate(self._texts()), self.flags.containing
        if not wanted:
            raise UserError("--containing=: legal: a text of at least one character.")
        numbers = [number for number, halves in texts if any(wanted in half for half in halves)]
        print_note(f"{len(numbers):,} documents contain the text.")
        self._show_documents(np.array(numbers, np.int64))

    def show_contamination(self) -> None:
        """Shows which lines of a file occur in the text, as measured in three papers."""
        index, size = self.rows.known_documents, self.flags.ngram
        sentences = input_lines(self.flags.contamination or "")
        lines, steps = list[Line](), defaultdict[int, set[int]](set)
        by_line = overlaps(sentences, self._texts(), size)
        documents = {document for overlap in by_line if overlap for document in overlap.documents}
        for document, *piece in index.pieces_of(np.array([*documents], np.int64)).tolist():
            steps[document].update(self._steps(*piece))
        for number, (sentence, overlap) in enumerate(zip(sentences, by_line, strict=True), 1):
            if overlap is not None:
                names = index.names(np.array(overlap.documents, np.int64))
                read = sorted(set().union(*(steps[document] for document in overlap.documents)))
                lines.append({"line": number, **overlap._asdict(), "documents": names,
                              "steps": read, "text": sentence})  # fmt: skip
        if not lines:
            raise UserError(f"--contamination={self.flags.contamination}: no line has words.")
        counts = {name: sum(map(is_so, lines)) for name, (_, is_so) in MEASURES.items()}
        print_table([f"{size}-grams", "lines", f"of {len(lines):,}"], [
            (MEASURES[name][0], n, f"{n / len(lines):.2%}") for name, n in counts.items()
        ])  # fmt: skip
        dirty = [line for line in lines if line["documents"]]
        print_lines(dirty[:MOST_LINES])
        if len(dirty) > MOST_LINES:
            print_note(f"Shows the first {MOST_LINES} dirty lines; --json=FILE writes all.")
        write_json(self.flags.json_file, {"ngram": size, "counts": counts, "lines": lines})

    def _texts(self) -> Iterator[Sequence[str]]:
        """Yields the texts of each document: one, or two for a pair."""
        with progress_bar("search") as progress:
            for example in self.prepared.examples(self.task, self.flags.split, progress):
                yield [example] if isinstance(example, str) else example

    def _show_documents(self, documents: np.ndarray) -> None:
        """Shows each piece of the documents, with the steps that read it."""
        if len(documents) > MOST_DOCUMENTS:
            print_note(f"Shows the first {MOST_DOCUMENTS:,} of {len(documents):,} documents.")
            documents = documents[:MOST_DOCUMENTS]
        index = self.rows.known_documents
        pieces = index.pieces_of(documents)
        if len(missing := np.setdiff1d(documents, pieces[:, 0])):
            print_note(f"In no row, because they are longer: {', '.join(index.names(missing))}.")
        lines = []
        for _, row, segment in pieces[np.argsort(pieces[:, 0], kind="stable")].tolist():
            lines.append(self._segments(row, self.rows)[segment - 1])
            lines[-1] |= {"steps": self._steps(row, segment)} if self.ledger else {}
        self._show(lines)
        if self.flags.settings.model_dir is not None:
            saved = last_saved(self.flags.settings.model_dir)
            print_note(f"The newest checkpoint of the run is of step {saved:,}.")

    def _steps(self, row: int, segment: int) -> list[int]:
        if self.ledger is None:
            return []
        return list(self.ledger.steps_of_segment(row, segment, self.last_step))

    def _segments(self, row: int, rows: Rows) -> list[Line]:
        """Describes each segment of a row; an excluded segment has no tokens.

        If rows are cut, describes each part of a segment.
        """
        vocab, source_vocab = self.prepared.vocabs
        batch = rows.batch(np.array([row]))
        tokens_BL, segments_BL = read_rows(np.array([row]), rows.targets_BL, rows.segments_BL)
        names = rows.documents.names(rows.documents.of_row(row)) if rows.documents else []
        count = max(len(names), int(segments_BL.max()))
        tokens_BL, segments_BL = rows.cut(tokens_BL), rows.cut(segments_BL)
        segments = []
        for segment, part in itertools.product(range(1, count + 1), range(rows.per_row)):
            ids = tokens_BL[part][segments_BL[part] == segment]
            line: Line = {"row": row, "segment": segment}
            if rows.per_row > 1:
                line["part of the row"] = part + 1
            if names:
                line["document"] = names[segment - 1]
            if source_vocab is not None:
                sources = batch["inputs_BM"][batch["segments_BM"] == segment]
                line["source"] = source_vocab.decode(sources)
                line["source_tokens"] = len(sources)
                line["source_pieces"] = " ".join(source_vocab.pieces(sources))
            line["tokens"] = len(ids)
            line["text"] = vocab.text(ids)
            line["pieces"] = " ".join(vocab.pieces(ids))
            segments.append(line)
        return segments

    def _show(self, lines: Sequence[Line]) -> None:
        print_lines(lines)
        write_json(self.flags.json_file, lines)


def print_lines(lines: Iterable[Line]) -> None:
    """Prints lines with equal fields as a table, without the fields that only the JSON has."""
    kept = [{name: shown(x) for name, x in line.items() if name not in NOT_IN_TABLES}
            for line in lines]  # fmt: skip
    print_table(list(kept[0]) if kept else [], [list(line.values()) for line in kept])


def shown(value: object) -> object:
    """Shortens a list, and rounds a share."""
    if not isinstance(value, list):
        return f"{value:.3f}" if isinstance(value, float) else value
    return shortened(value, MOST_ITEMS) or "none"
