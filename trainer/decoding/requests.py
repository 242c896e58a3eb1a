"""Text in, text out: what decoding and its options mean for lines of text."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from configs.errors import UserError
from data.sources.pairs import chosen_tag, tagged
from data.task import Task
from data.vocab import EOS
from data.vocabs import Vocabs
from models.decoding.sampling import Sampling
from trainer.decoding.decoder import Answer, Decoder, Request
from trainer.decoding.mbr import consensus

Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Options:
    """What a user asks of the texts, beside how they are searched for."""

    seed: int = 0
    length_factor: float = 1.5
    """A translation has at most this many tokens for each of its source, ..."""
    length_extra: int = 10
    """... and these."""
    max_tokens: int | None = None
    """The most new tokens, in place of the two above."""
    min_tokens: int = 0
    prefix: str | None = None
    """What every translation begins with."""
    tag: str | None = None
    consensus: bool = False
    """Of the samples of a line, take the one that is most like all of them (chrF)."""


class Hypothesis(NamedTuple):
    """One text for a line."""

    text: str
    score: float
    log_probability: float


def continuing(
    prompts: Sequence[str], vocabs: Vocabs, options: Options, max_length: int | None, most: int
) -> list[Request]:
    """Requests to go on with each prompt."""
    most = options.max_tokens or most
    requests = []
    for line, prompt in enumerate(vocabs.target.encode(prompts)):
        if max_length is not None and len(prompt) + 1 + most > max_length:
            raise UserError(
                f"line {line + 1}: {len(prompt)} prompt tokens and {most} new ones do not fit in "
                f"the model's {max_length} learned positions.  Shorten it, or lower --max_tokens."
            )
        requests.append(Request(prompt, most, seed_of(options, line), options.min_tokens + 1))
    return requests


def translating(
    sources: Sequence[str],
    task: Task,
    vocabs: Vocabs,
    options: Options,
    max_length: int | None,
    say: Say,
) -> list[Request]:
    """Requests to translate each line; lines longer than the task's rows are cut and counted."""
    tag = chosen_tag(options.tag, task.tags)
    source_length = task.row_lengths["source_length"]
    [prefix] = vocabs.target.encode([options.prefix or ""])
    requests, cut = [], 0
    for line, ids in enumerate(vocabs.of_source.encode([tagged(text, tag) for text in sources])):
        if len(ids) + 1 > source_length:
            ids, cut = ids[: source_length - 1], cut + 1
        source = [*map(int, ids), EOS]
        most = options.max_tokens or int(len(source) * options.length_factor) + options.length_extra
        if max_length is not None:
            most = min(most, max_length - 1 - len(prefix))
        least = min(options.min_tokens + 1, most)
        requests.append(Request(prefix, most, seed_of(options, line), least, source))
    if cut:
        say(
            f"Warning: {cut} of {len(sources)} lines have more than {source_length - 1} "
            "tokens (Translation.source_length); only their beginnings are translated."
        )
    return requests


def seed_of(options: Options, line: int) -> int:
    """A line's own seed."""
    return int(np.random.SeedSequence([options.seed, line]).generate_state(1)[0])


def hypotheses(
    decoder: Decoder, requests: Sequence[Request], lines: Sequence[int], vocabs: Vocabs,
    options: Options,
) -> Iterator[list[tuple[int, list[Hypothesis]]]]:  # fmt: skip
    """Yields, batch by batch, some of the lines with their texts, the best first.

    An empty source is its own translation.
    """
    blank = [line for line in lines if requests[line].source == [EOS]]
    if blank:
        yield [(line, [Hypothesis("", 0.0, 0.0)]) for line in blank]
        lines = [line for line in lines if requests[line].source != [EOS]]
    for batch in decoder.answers([requests[line] for line in lines]):
        yield [
            (lines[i], ranked([hypothesis(requests[lines[i]], a, vocabs) for a in found], options))
            for i, found in batch
        ]


def hypothesis(request: Request, answer: Answer, vocabs: Vocabs) -> Hypothesis:
    ids = [*map(int, request.prompt), *answer.tokens]
    return Hypothesis(vocabs.target.decode(ids), answer.score, answer.log_probability)


def ranked(found: list[Hypothesis], options: Options) -> list[Hypothesis]:
    """The hypotheses of one line in order; with consensus, the one in the middle goes first."""
    if not options.consensus:
        return found
    first = consensus([one.text for one in found])
    return [found[first], *found[:first], *found[first + 1 :]]


def texts_of(
    decoder: Decoder,
    requests: Sequence[Request],
    vocabs: Vocabs,
    options: Options,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> list[str]:
    """The best text of each line, in order."""
    texts, done = [""] * len(requests), 0
    for batch in hypotheses(decoder, requests, range(len(requests)), vocabs, options):
        for line, found in batch:
            texts[line] = found[0].text
        done += len(batch)
        report(done, len(requests))
    return texts


def check_search(options: Options, search: object) -> None:
    """Refuses options that need samples where there are none."""
    if options.consensus and not (isinstance(search, Sampling) and search.width > 1):
        raise UserError("--consensus: it chooses among samples.  Give --samples=16, for example.")


def requests_of(
    lines: Sequence[str],
    task: Task,
    vocabs: Vocabs,
    options: Options,
    max_length: int | None,
    say: Say,
) -> list[Request]:
    """What the lines ask of a model of this task."""
    if task.has_source:
        return translating(lines, task, vocabs, options, max_length, say)
    return continuing(lines, vocabs, options, max_length, task.length // 2)
