"""What `decode`, `score` and `rescore` do, in a few calls."""

import dataclasses
import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TextIO

from configs.errors import UserError
from data.sources.pairs import Pair
from data.task import Task
from models.decoding.beam import Beam
from models.decoding.ensemble import as_ensemble
from models.decoding.generate import Search
from models.decoding.sampling import Sampling
from scripts.commands.common import (
    Strings,
    batch_of,
    only,
    open_output,
    read_input,
    trained_models,
)
from scripts.terminal import Bar, tell
from trainer.checkpoints.restore import Trained, chosen_steps
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
from trainer.decoding.score import Score, score_lines

BEAM = 4  # of translations; other texts are continued greedily
BATCH = 64
Format = Literal["text", "tsv", "jsonl"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wishes:
    """How to search and for what, by the names of the flags."""

    beam: int | None = None
    alpha: float = 0.6
    length_penalty: Literal["gnmt", "power"] = "gnmt"
    flat: bool = True
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    samples: int | None = None
    consensus: bool = False
    seed: int = 0
    max_tokens: int | None = None
    min_tokens: int = 0
    length_factor: float = 1.5
    length_extra: int = 10
    prefix: str | None = None
    tag: str | None = None

    def search(self, task: Task) -> Search:
        """Sampling where a temperature or samples are asked for; otherwise a beam, or greedy."""
        draws = self.temperature is not None or self.samples is not None
        if draws and self.beam is not None:
            raise UserError("--beam with --temperature or --samples: choose one way to search.")
        if draws:
            temperature = 1.0 if self.temperature is None else self.temperature
            return Sampling(temperature, self.top_k, self.top_p, self.samples or 1)
        if self.top_k is not None or self.top_p is not None:
            raise UserError("--top_k and --top_p cut what is drawn from.  Give --temperature=1.")
        width = self.beam or (BEAM if task.has_source else 1)
        if width == 1:
            return Sampling(temperature=0)
        return Beam(width, self.alpha, self.length_penalty, self.flat)

    def options(self) -> DecodeOptions:
        names = {field.name for field in dataclasses.fields(DecodeOptions)}
        return DecodeOptions(**{n: v for n, v in dataclasses.asdict(self).items() if n in names})


def decoder_of(members: Sequence[Trained], wishes: Wishes, batch_sequences: int | None) -> Decoder:
    """One model, or several that decode together."""
    trained = members[0]
    search = wishes.search(trained.run.task)
    check_search(wishes.options(), search)
    model, params = as_ensemble(trained.model, [member.params for member in members])
    rows = batch_of(trained, batch_sequences or BATCH)
    return Decoder(model, params, trained.mesh, search, rows)


def continuations(
    prompts: Sequence[str], model_dir: Path, batch_sequences: int | None = None, **wanted: Any
) -> list[str]:
    """The best text for each line."""
    wishes = Wishes(**wanted)
    with trained_models(model_dir, (), ()) as models, Bar("decode") as bar:
        trained = models.open(None)
        run, options = trained.run, wishes.options()
        places = run.model.max_length
        requests = make_requests(prompts, run.task, trained.vocabs, options, places, tell)
        decoder = decoder_of([trained], wishes, batch_sequences)
        return best_texts(decoder, requests, trained.vocabs, options, bar.update)


def decode_file(
    model_dir: Path,
    gin_file: Strings,
    gin_param: Strings,
    checkpoint: str,
    average: int | None,
    input: str,
    output: str,
    batch_sequences: int | None,
    nbest: int | None,
    format: Format,
    **wanted: Any,
) -> None:
    """Decodes a file; one that was broken off goes on where it stopped."""
    wishes, lines = Wishes(**wanted), list(read_input(input))
    with trained_models(model_dir, gin_file, gin_param) as models:
        steps = chosen_steps(models.checkpoints, checkpoint)
        members = [models.open(step, average) for step in steps]
        trained, options = members[0], wishes.options()
        run, decoder = trained.run, decoder_of(members, wishes, batch_sequences)
        if nbest is not None and nbest > decoder.search.width:
            raise UserError(
                f"--nbest={nbest}: the search keeps {decoder.search.width} texts a line.  "
                "Widen it with --beam or --samples."
            )
        places = run.model.max_length
        requests = make_requests(lines, run.task, trained.vocabs, options, places, tell)

        def decoded(left: Sequence[int]) -> Iterator[list[tuple[int, list[Hypothesis]]]]:
            done = 0
            with Bar("decode") as bar:
                for batch in decode_lines(decoder, requests, left, trained.vocabs, options):
                    yield [(line, found[: nbest or 1]) for line, found in batch]
                    done += len(batch)
                    bar.update(done, len(left))

        def write(file: TextIO, found: Mapping[int, Sequence[Sequence[Any]]]) -> None:
            for line, source in enumerate(lines):
                file.writelines(formatted(format, line, source, found[line]))

        start = time.perf_counter()
        if output == "-":
            found: dict[int, list[Hypothesis]] = {}
            for batch in decoded(range(len(lines))):
                found.update(batch)
            with open_output(output) as file:
                write(file, found)
            say_throughput(len(lines), start)
            return
        made_by = {
            "input": fingerprint(lines),
            "model_dir": str(model_dir),
            "steps": [member.step for member in members],
            "average": average,
            "nbest": nbest,
            "format": format,
            **dataclasses.asdict(wishes),
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
                journal.add((line, [list(one) for one in own]) for line, own in batch)
                done.update(batch)
            journal.finish(lambda file: write(file, done))
        say_throughput(len(left), start)


def formatted(
    format: Format, line: int, source: str, found: Sequence[Sequence[Any]]
) -> Iterable[str]:
    """The lines of an output for one line of the input."""
    rows = [Hypothesis(*one) for one in found]
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


def score_file(
    model_dir: Path,
    gin_file: Strings,
    gin_param: Strings,
    checkpoint: str,
    average: int | None,
    input: str,
    output: str,
    batch_sequences: int | None,
    tag: str | None,
) -> None:
    """Scores each line, or each pair of a source and a target with a tab between."""
    scores = scores_of(
        list(read_input(input)), model_dir, gin_file, gin_param, checkpoint, average,
        batch_sequences, tag,
    )  # fmt: skip
    with open_output(output) as file:
        file.write("log_likelihood\twords\ttokens\n")
        file.writelines(f"{s.log_likelihood:.6f}\t{s.words}\t{s.tokens}\n" for s in scores)


def scores_of(
    lines: Sequence[str],
    model_dir: Path,
    gin_file: Strings,
    gin_param: Strings,
    checkpoint: str,
    average: int | None,
    batch_sequences: int | None,
    tag: str | None,
) -> list[Score]:
    with trained_models(model_dir, gin_file, gin_param) as models, Bar("score") as bar:
        trained = models.open(only(chosen_steps(models.checkpoints, checkpoint)), average)
        scores = score_lines(
            trained.model,
            trained.params,
            lines,
            trained.run.task,
            trained.vocabs,
            trained.mesh,
            batch_of(trained, batch_sequences),
            bar.update,
            tag=tag,
        )
    long = sum(not score.tokens for score in scores)
    if long:
        tell(f"Warning: {long} of {len(lines)} pairs are longer than a row and have no score.")
    return scores


def rescore_file(
    input: str, output: str, weight: float, alpha: float, tag: str | None, **model: Any
) -> None:
    """Ranks the hypotheses of an n-best list again, with the say of another model."""
    entries = [_entry(number, line) for number, line in enumerate(read_input(input), 1)]
    pairs = [Pair(entry["source"], one["text"]) for entry in entries for one in entry["hypotheses"]]
    lines = ["\t".join(part.replace("\t", " ") for part in pair) for pair in pairs]
    scores = iter(scores_of(lines, tag=tag, **model))
    with open_output(output) as file:
        for entry in entries:
            for one, score in zip(entry["hypotheses"], scores, strict=False):
                both = one["log_probability"] + weight * score.log_likelihood
                one["rescored"] = both / ((5 + score.tokens) / 6) ** alpha
            entry["hypotheses"].sort(key=lambda one: one["rescored"], reverse=True)
            file.write(json.dumps(entry, ensure_ascii=False) + "\n")


def _entry(number: int, line: str) -> dict[str, Any]:
    try:
        entry: dict[str, Any] = json.loads(line)
        for one in entry["hypotheses"]:
            one["text"], one["log_probability"] = str(one["text"]), float(one["log_probability"])
        entry["source"] = str(entry["source"])
        return entry
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(
            f"line {number}: no n-best entry ({type(error).__name__}: {error}).  Make the list "
            "with: meshloom decode --nbest=4 --format=jsonl."
        ) from None
