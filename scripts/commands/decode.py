"""`meshloom decode`: translates sources or continues prompts."""

import dataclasses
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from configs.errors import UserError
from data.storage import is_stream
from data.task import Task
from models.decoding.beam import Beam
from models.decoding.ensemble import as_ensemble
from models.decoding.generate import Search
from models.decoding.sampling import Sampling
from scripts.commands.common import open_output, read_input
from scripts.commands.flags.decode import DecodeFlags, Format
from scripts.commands.flags.shared import CheckpointFlags, SearchFlags
from scripts.commands.trained import batch_of, decode_program, trained_models
from scripts.terminal import Bar, tell
from trainer.checkpoints.restore import TrainedModel, chosen_steps
from trainer.checks import Program
from trainer.decoding.decoder import Decoder
from trainer.decoding.journal import Journal, fingerprint
from trainer.decoding.requests import (
    DecodeOptions,
    Hypothesis,
    best_texts,
    check_search,
    decode_lines,
    make_requests,
)
from trainer.run import Run

BEAM = 4  # of translations; other texts are continued greedily
BATCH = 64


def search_of(flags: SearchFlags, task: Task) -> Search:
    """Samples with a temperature or a number of samples; otherwise searches by beam or greedily."""
    is_sampling = flags.temperature is not None or flags.samples is not None
    if is_sampling and flags.beam is not None:
        raise UserError("--beam with --temperature or --samples: choose one way to search.")
    if is_sampling:
        temperature = 1.0 if flags.temperature is None else flags.temperature
        samples = flags.samples or 1
        return Sampling(temperature, flags.top_k, flags.top_p, samples, flags.flat)
    if flags.top_k is not None or flags.top_p is not None:
        raise UserError("--top_k and --top_p cut what is drawn from.  Give --temperature=1.")
    width = flags.beam or (BEAM if task.has_source else 1)
    if width == 1:
        return Sampling(temperature=0)
    return Beam(width, flags.alpha, flags.length_penalty, flags.flat)


def options_of(flags: SearchFlags) -> DecodeOptions:
    """Returns the options of the decoder among the flags, which have the same names."""
    names = {field.name for field in dataclasses.fields(DecodeOptions)}
    return DecodeOptions(**{n: v for n, v in dataclasses.asdict(flags).items() if n in names})


def decoder_of(
    members: Sequence[TrainedModel], flags: SearchFlags, batch_sequences: int | None
) -> Decoder:
    """Makes the decoder of one model, or of several that decode together."""
    trained = members[0]
    search = search_of(flags, trained.run.task)
    check_search(options_of(flags), search)
    model, params = as_ensemble(trained.model, [member.params for member in members])
    rows = batch_of(trained, batch_sequences or BATCH)
    return Decoder(model, params, trained.mesh, search, rows)


def programs_of(flags: SearchFlags) -> Callable[[Run], list[Program]]:
    """Returns what decoding with these flags traces, given a run."""
    return lambda run: [decode_program(run, search_of(flags, run.task))]


def continuations(
    prompts: Sequence[str],
    model_dir: Path,
    flags: SearchFlags,
    batch_sequences: int | None = None,
) -> list[str]:
    """Returns the best text for each line."""
    checkpoint = CheckpointFlags(model_dir=model_dir)
    with trained_models(checkpoint, programs_of(flags)) as models, Bar("decode") as bar:
        trained = models.restore(None)
        run, options = trained.run, options_of(flags)
        max_length = run.model.max_length
        requests = make_requests(prompts, run.task, trained.vocabs, options, max_length)
        decoder = decoder_of([trained], flags, batch_sequences)
        return best_texts(decoder, requests, trained.vocabs, options, bar.update)


def decode_file(flags: DecodeFlags) -> None:
    """Decodes a file; continues one that was interrupted."""
    lines, output = list(read_input(flags.input)), flags.output
    with trained_models(flags.model, programs_of(flags.search)) as models:
        steps = chosen_steps(models.checkpoints, flags.model.checkpoint)
        members = [models.restore(step, flags.model.average) for step in steps]
        trained, options = members[0], options_of(flags.search)
        run, decoder = trained.run, decoder_of(members, flags.search, flags.batch_sequences)
        if flags.nbest is not None and flags.nbest > decoder.search.width:
            raise UserError(
                f"--nbest={flags.nbest}: the search keeps {decoder.search.width} texts a line.  "
                "Widen it with --beam or --samples."
            )
        max_length = run.model.max_length
        requests = make_requests(lines, run.task, trained.vocabs, options, max_length)

        def decoded(left: Sequence[int]) -> Iterator[list[tuple[int, list[Hypothesis]]]]:
            done = 0
            with Bar("decode") as bar:
                for batch in decode_lines(decoder, requests, left, trained.vocabs, options):
                    yield [(line, texts[: flags.nbest or 1]) for line, texts in batch]
                    done += len(batch)
                    bar.update(done, len(left))

        def write(file: TextIO, texts: Mapping[int, Sequence[Sequence[Any]]]) -> None:
            for line, source in enumerate(lines):
                file.writelines(formatted(flags.format, line, source, texts[line]))

        start = time.perf_counter()
        if output == "-" or is_stream(Path(output)):
            texts: dict[int, list[Hypothesis]] = {}
            for batch in decoded(range(len(lines))):
                texts.update(batch)
            with open_output(output) as file:
                write(file, texts)
            say_throughput(len(lines), start)
            return
        made_by = {
            "input": fingerprint(lines),
            "model_dir": str(flags.model.model_dir),
            "steps": [member.step for member in members],
            "average": flags.model.average,
            "nbest": flags.nbest,
            "format": flags.format,
            **dataclasses.asdict(flags.search),
        }
        journal = Journal(Path(output), made_by)
        if journal.is_done():
            tell(f"{output} is there already, made by the same settings.")
            return
        done: dict[int, Any] = dict(journal.open())
        if done:
            tell(f"Continuing after {len(done):,} of {len(lines):,} lines.")
        left = [line for line in range(len(lines)) if line not in done]
        with journal:
            for batch in decoded(left):
                journal.add((line, [list(one) for one in texts]) for line, texts in batch)
                done.update(batch)
            journal.finish(lambda file: write(file, done))
        say_throughput(len(left), start)


def formatted(
    format: Format, line: int, source: str, hypotheses: Sequence[Sequence[Any]]
) -> Iterable[str]:
    """Returns the lines of the output for one line of the input."""
    rows = [Hypothesis(*one) for one in hypotheses]
    rows = [one._replace(text=one.text.replace("\n", " ")) for one in rows]
    match format:
        case "text":
            return [f"{one.text}\n" for one in rows]
        case "tsv":
            return [
                f"{line + 1}\t{rank}\t{one.score:.6f}\t{one.log_probability:.6f}\t"
                f"{one.text.replace(chr(9), ' ')}\n"
                for rank, one in enumerate(rows, 1)
            ]
        case "jsonl":
            entry = {"source": source, "hypotheses": [one._asdict() for one in rows]}
            return [json.dumps(entry, ensure_ascii=False) + "\n"]


def say_throughput(lines: int, start: float) -> None:
    seconds = time.perf_counter() - start
    tell(f"{lines:,} lines in {seconds:.1f} s: {lines / seconds:.1f} lines/s.")
