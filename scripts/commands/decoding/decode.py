"""Runs `meshloom decode`: translates sources or continues prompts."""

import dataclasses
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from configs.errors import UserError
from configs.paths import path_of
from configs.write import diff, shown
from data.sources.text_files import in_one_line
from data.storage.files import is_stream
from data.task import Task
from models.decoding.beam import Beam
from models.decoding.ensemble import as_ensemble
from models.decoding.generate import Search
from models.decoding.sampling import Sampling
from scripts.commands.common import input_lines, open_output, write_json
from scripts.commands.decoding.flags import DecodeFlags, Format
from scripts.commands.shared_flags import CheckpointFlags, SearchFlags
from scripts.commands.trained import batch_of, decode_trace_fn, trained_models
from scripts.terminal import print_note, progress_bar
from trainer.checkpoints.restore import ModelRestorer, TrainedModel, chosen_steps
from trainer.checks import TraceFn
from trainer.decoding.decoder import Decoder, Request, prepared
from trainer.decoding.journal import Journal
from trainer.decoding.requests import (
    DecodeOptions,
    Hypothesis,
    LineDecoder,
    check_search,
    suffix_of,
)
from trainer.model_dir import ModelDir
from trainer.multihost import from_first_process, is_first_process
from trainer.run import Run
from trainer.serving.service import Compilations
from trainer.translation.metrics import text_hash

BEAM = 4  # for translations; other texts are continued greedily
BATCH = 64


def search_of(flags: SearchFlags, task: Task) -> Search:
    """Returns sampling if a temperature or number of samples is set, else beam or greedy search."""
    is_sampling = flags.temperature is not None or flags.samples is not None
    if is_sampling and flags.beam is not None:
        raise UserError("--beam with --temperature or --samples: choose either search or sampling.")
    if is_sampling:
        temperature = 1.0 if flags.temperature is None else flags.temperature
        samples = flags.samples or 1
        limits = (temperature, flags.top_k, flags.top_p)
        return Sampling(*limits, samples, flags.flat, flags.min_p or 0.0)
    if (flags.top_k, flags.top_p, flags.min_p) != (None, None, None):
        raise UserError("--top_k, --top_p and --min_p need sampling.  Add --temperature=1.")
    width = flags.beam or (BEAM if task.has_source else 1)
    if width == 1:
        return Sampling(temperature=0)
    return Beam(width, flags.alpha, flags.length_penalty, flags.flat)


def options_of(flags: SearchFlags) -> DecodeOptions:
    """Returns the options of the decoder, which have the same names as the flags."""
    names = {field.name for field in dataclasses.fields(DecodeOptions)}
    return DecodeOptions(**{n: v for n, v in dataclasses.asdict(flags).items() if n in names})


def decoder_of(
    members: Sequence[TrainedModel], flags: SearchFlags, batch_sequences: int | None
) -> LineDecoder:
    """Makes a decoder for one model, or for several as an ensemble."""
    trained, options = members[0], options_of(flags)
    run, vocabs, search = trained.run, trained.vocabs, search_of(flags, trained.run.task)
    check_search(options, search)
    model, params = as_ensemble(trained.model, [member.params for member in members])
    rows = batch_of(trained, batch_sequences or BATCH)
    special, suffix = vocabs.target.special, suffix_of(options, vocabs)
    weights = prepared(model, params, trained.mesh)
    decoder = Decoder(model, weights, trained.mesh, search, rows, **special, suffix=suffix)
    return LineDecoder(decoder, run.task, vocabs, options, run.model.max_length)


def trace_fns_of(flags: SearchFlags) -> Callable[[Run], list[TraceFn]]:
    """Returns a function from a run to what is traced for decoding with these flags."""
    ranks = flags.rescore_suffix is not None
    return lambda run: [decode_trace_fn(run, search_of(flags, run.task), with_suffix=ranks)]


def continuations(
    prompts: Sequence[str], model_dir: Path, flags: SearchFlags, batch_sequences: int | None = None
) -> list[str]:
    """Returns the best text for each prompt."""
    checkpoint, traced = CheckpointFlags(model_dir=model_dir), trace_fns_of(flags)
    with trained_models(checkpoint, traced) as models, progress_bar("decode") as update:
        decoder = decoder_of([models.restore(None)], flags, batch_sequences)
        return decoder.best_texts(decoder.requests(prompts), update)


def decode_file(flags: DecodeFlags) -> None:
    """Decodes a file, or continues where an earlier call was interrupted."""
    lines = input_lines(flags.input)
    with trained_models(flags.model, trace_fns_of(flags.search)) as models:
        steps = chosen_steps(models.checkpoints, flags.model.checkpoint)
        members = [models.restore(step, flags.model.average) for step in steps]
        made_from = origin_of(flags.model, models, members)
        decoder = decoder_of(members, flags.search, flags.batch_sequences)
        del members  # the decoder has its own copy of their weights
        width = decoder.decoder.search.width
        if flags.nbest is not None and flags.nbest > width:
            raise UserError(
                f"--nbest={flags.nbest}: the search keeps {width} texts per line.  "
                "Widen it with --beam or --samples."
            )
        job = DecodeJob(flags, lines, decoder.requests(lines), decoder, made_from)
        if flags.output == "-" or from_first_process(lambda: is_stream(path_of(flags.output))):
            job.write_stream()
        else:
            job.write_file()


def origin_of(
    flags: CheckpointFlags, models: ModelRestorer, members: Sequence[TrainedModel]
) -> dict[str, Any]:
    """Returns the checkpoints of a model, and its settings that differ from those of its run."""
    run, recorded = models.run, ModelDir(flags.model_dir).recorded_run()
    changes = [*diff(recorded.model, run.model), *diff(recorded.task, run.task)]
    averaged = [step for member in members for step in member.averaged_steps]
    return {
        "steps": [member.step for member in members],
        "checkpoints": models.checkpoints.identity(averaged),
        "changes": {name: shown(now) for name, _, now in changes},
    }


@dataclasses.dataclass(frozen=True)
class DecodeJob:
    """Decodes lines, and writes them in order in the format that the flags choose."""

    flags: DecodeFlags
    lines: Sequence[str]
    requests: Sequence[Request]
    decoder: LineDecoder
    made_from: Mapping[str, Any]

    def write_stream(self) -> None:
        """Writes to the standard output or to a device, once all lines are decoded."""
        throughput = Throughput()
        texts = dict(decoded for batch in self.decode(range(len(self.lines))) for decoded in batch)
        with open_output(self.flags.output) as file:
            self.write(file, texts)
        self.write_json(texts)
        throughput.print(len(self.lines))

    def write_file(self) -> None:
        """Writes a file; the next call continues what a crash interrupts."""
        throughput, output = Throughput(), path_of(self.flags.output)
        journal = Journal(output, self.settings)
        done = from_first_process(lambda: None if journal.is_done() else [*journal.open().items()])
        if done is None:
            if self.flags.json_file is not None:
                raise UserError(
                    f"{output} already exists, made with the same settings, but does not contain "
                    f"all results for --json={self.flags.json_file}.  Remove it or --json."
                )
            print_note(f"{output} already exists, made with the same settings.")
            return
        texts = {line: [Hypothesis(*one) for one in decoded] for line, decoded in done}
        if texts:
            print_note(f"Resuming after {len(texts):,} of {len(self.lines):,} lines.")
        left = [line for line in range(len(self.lines)) if line not in texts]
        if not is_first_process():
            for _ in self.decode(left):
                pass  # process 0 writes the texts
            return
        with journal:
            for batch in self.decode(left):
                journal.add((line, [list(one) for one in decoded]) for line, decoded in batch)
                texts.update(batch)
            self.write_json(texts)
            journal.finish(lambda file: self.write(file, texts))
        throughput.print(len(left))

    @property
    def settings(self) -> dict[str, Any]:
        """Returns everything that determines the output."""
        model = self.flags.model
        return {
            "input": text_hash([self.lines])[:16],
            "model_dir": str(model.model_dir),
            **self.made_from,
            "average": model.average,
            "weights": model.weights,
            "nbest": self.flags.nbest,
            "format": self.flags.written_format,
            **dataclasses.asdict(self.flags.search),
        }

    def decode(self, left: Sequence[int]) -> Iterator[list[tuple[int, list[Hypothesis]]]]:
        """Yields batches of these lines, with the texts to write."""
        done = 0
        with progress_bar("decode") as update:
            for batch in self.decoder.decode(self.requests, left):
                yield [(line, texts[: self.flags.nbest or 1]) for line, texts in batch]
                done += len(batch)
                update(done, len(left))

    def write(self, file: TextIO, texts: Mapping[int, Sequence[Hypothesis]]) -> None:
        """Writes the texts of all lines; with a header line if they are in columns."""
        if self.flags.written_format == "tsv":
            file.write("line\trank\tscore\tlog_probability\ttext\n")
        alone = len(self.lines) == (self.flags.nbest or 1) == 1 and self.requests[0].is_answer
        for line, source in enumerate(self.lines):
            rows = format_line(self.flags.written_format, line, source, texts[line], alone)
            file.writelines(rows)

    def write_json(self, texts: Mapping[int, Sequence[Hypothesis]]) -> None:
        """Writes the settings and the texts of all lines as one JSON object, if a file is named."""
        if self.flags.json_file is None:
            return
        lines = [entry_of(source, texts[line]) for line, source in enumerate(self.lines)]
        write_json(self.flags.json_file, {"settings": self.settings, "lines": lines})


def format_line(
    format: Format, line: int, source: str, hypotheses: Sequence[Hypothesis], alone: bool = False
) -> Iterable[str]:
    """Returns the output lines for one input line.

    JSON keeps newlines in texts.  So does a single answer that is the whole output.
    """
    match format:
        case "text":
            return [f"{one.text if alone else in_one_line(one.text)}\n" for one in hypotheses]
        case "tsv":
            return [
                f"{line + 1}\t{rank}\t{one.score:.6f}\t{one.log_probability:.6f}\t"
                f"{in_one_line(one.text).replace(chr(9), ' ')}\n"
                for rank, one in enumerate(hypotheses, 1)
            ]
        case "jsonl":
            return [json.dumps(entry_of(source, hypotheses), ensure_ascii=False) + "\n"]


def entry_of(source: str, hypotheses: Sequence[Hypothesis]) -> dict[str, Any]:
    """Returns the JSON object for one input line."""
    return {"source": source, "hypotheses": [one._asdict() for one in hypotheses]}


class Throughput:
    """Measures how fast lines are decoded, with and without compilation."""

    def __init__(self) -> None:
        self._start, self._compilations = time.perf_counter(), Compilations()

    def print(self, lines: int) -> None:
        seconds, compile_s = time.perf_counter() - self._start, self._compilations.seconds
        rate = lines / max(seconds - compile_s, 1e-3)
        print_note(
            f"{lines:,} line{'s' * (lines != 1)} in {seconds:.1f} s, of which {compile_s:.1f} s to "
            f"compile: {rate:.1f} lines/s without that."
        )
