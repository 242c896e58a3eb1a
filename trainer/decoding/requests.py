"""Decodes lines of text: turns lines into requests, and decoded tokens into texts."""

import dataclasses
import functools
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from sacrebleu.metrics.chrf import CHRF

from configs.errors import UserError
from data.sources.pairs import chosen_tag, tagged
from data.task import Task
from data.vocabs import Vocabs
from models.decoding.sampling import Sampling
from trainer.decoding.decoder import Decoder, Request, TokenHypothesis, with_finite_score
from trainer.evaluate import Progress, no_progress

logger = logging.getLogger(__name__)

CHRF2 = CHRF()
SAME = 100.0  # of a text against itself


def consensus(samples: Sequence[str]) -> int:
    """Returns the index of the sample that agrees most with all samples; of equals, the first.

    This is minimum Bayes risk decoding under chrF.
    """
    of_samples = utilities(samples)
    return of_samples.index(max(of_samples))


def utilities(samples: Sequence[str]) -> list[float]:
    """Returns the mean sentence chrF of each sample against all, in percent.

    Each sample also counts itself, as full agreement, which does not change the order.
    """
    counts = Counter(samples)

    def total(text: str) -> float:
        others = ((x, n) for x, n in counts.items() if x != text)
        scores = (n * CHRF2.sentence_score(text, [x]).score for x, n in others)
        return SAME * counts[text] + sum(scores)

    return [of_text / len(samples) for of_text in map(functools.cache(total), samples)]


@dataclasses.dataclass(frozen=True)
class DecodeOptions:
    """Holds the settings of decoded texts that are not part of the search."""

    seed: int = 0
    length_factor: float = 1.5
    """A translation has at most this number of tokens for each source token, ..."""
    length_extra: int = 10
    """... plus this number."""
    max_tokens: int | None = None
    """The maximum number of new tokens, instead of the two above."""
    min_tokens: int = 0
    prefix: str | None = None
    """What every translation begins with."""
    tag: str | None = None
    consensus: bool = False
    """Choose the sample of a line that is most like all of them (chrF)."""
    rescore_suffix: str | None = None
    """Rank the samples of a line by the likelihood of this text after each."""


class Hypothesis(NamedTuple):
    """Holds one decoded text of a line."""

    text: str
    score: float
    log_probability: float


def continuation_requests(
    prompts: Sequence[str],
    vocabs: Vocabs,
    options: DecodeOptions,
    max_length: int | None,
    max_new_tokens: int,
) -> list[Request]:
    """Makes requests to continue each prompt."""
    max_new_tokens = options.max_tokens or max_new_tokens
    requests, suffix = [], len(suffix_of(options, vocabs))
    for line, prompt in enumerate(vocabs.target.encode(prompts)):
        if max_length is not None and len(prompt) + 1 + max_new_tokens + suffix > max_length:
            of_suffix = f" and {suffix} of --rescore_suffix" if suffix else ""
            raise UserError(
                f"line {line + 1}: {len(prompt)} prompt tokens and {max_new_tokens} new ones"
                f"{of_suffix} do not fit in the model's {max_length} positions.  Shorten "
                "it, or lower --max_tokens."
            )
        min_new_tokens = min(options.min_tokens + 1, max_new_tokens)
        requests.append(Request(prompt, max_new_tokens, line_seed(options, line), min_new_tokens))
    return requests


def check_prefix(options: DecodeOptions, task: Task) -> None:
    if options.prefix is not None and not task.has_source:
        raise UserError(f"--prefix: {task.name} has no translations.  Put it into the prompts.")


def translation_requests(
    sources: Sequence[str],
    task: Task,
    vocabs: Vocabs,
    options: DecodeOptions,
    max_length: int | None,
    name: str | None = None,
) -> list[Request]:
    """Makes requests to translate each line; truncates lines longer than a row, and warns of them.

    `name` identifies the text in a warning, if there are several.
    """
    tag = chosen_tag(options.tag, task.tags)
    source_length = task.row_lengths["source_length"]
    [prefix] = vocabs.target.encode([options.prefix or ""])
    given = len(prefix) + len(suffix_of(options, vocabs))
    room = None if max_length is None else max_length - 1 - given
    if room is not None and room < 1:
        raise UserError(
            f"--prefix and --rescore_suffix have {given} tokens, which leave no room for a "
            f"translation in the model's {max_length} positions.  Shorten them."
        )
    requests, cut = [], 0
    # A blank line gets no tag, so that its translation stays empty.
    texts = [tagged(text, tag) if text.strip() else "" for text in sources]
    for line, ids in enumerate(vocabs.of_source.encode(texts)):
        if len(ids) + 1 > source_length:
            ids, cut = ids[: source_length - 1], cut + 1
        source = [*map(int, ids), vocabs.of_source.end_id]
        max_new_tokens = (
            options.max_tokens or int(len(source) * options.length_factor) + options.length_extra
        )
        if room is not None:
            max_new_tokens = min(max_new_tokens, room)
        min_new_tokens = min(options.min_tokens + 1, max_new_tokens)
        seed = line_seed(options, line)
        requests.append(Request(prefix, max_new_tokens, seed, min_new_tokens, source))
    if cut:
        logger.warning(
            "Warning: %s%d of %d lines have more than %d tokens (Translation.source_length); only "
            "their beginnings are translated.",
            "" if name is None else f"{name}: ", cut, len(sources), source_length - 1,
        )  # fmt: skip
    return requests


def line_seed(options: DecodeOptions, line: int) -> int:
    """Returns the seed of a line."""
    return int(np.random.SeedSequence([options.seed, line]).generate_state(1)[0])


def is_blank(request: Request, vocabs: Vocabs) -> bool:
    """Returns whether a source is empty, so that its translation is empty."""
    return request.source is not None and list(request.source) == [vocabs.of_source.end_id]


def to_hypothesis(request: Request, tokens: TokenHypothesis, vocabs: Vocabs) -> Hypothesis:
    """Decodes the tokens of a hypothesis, after those of its prompt unless it is an answer."""
    prompt = () if request.is_answer else map(int, request.prompt)
    text = vocabs.target.text([*prompt, *tokens.tokens])
    return Hypothesis(text, tokens.score, tokens.log_probability)


def rank(hypotheses: list[Hypothesis], options: DecodeOptions) -> list[Hypothesis]:
    """Orders the hypotheses of a line; with consensus, the one most like all goes first."""
    if not options.consensus:
        return hypotheses
    first = consensus([one.text for one in hypotheses])
    return [hypotheses[first], *hypotheses[:first], *hypotheses[first + 1 :]]


def check_search(options: DecodeOptions, search: object) -> None:
    """Rejects options that need samples if the search gives none."""
    names = ["--consensus"] if options.consensus else []
    names += [] if options.rescore_suffix is None else ["--rescore_suffix"]
    if len(names) > 1:
        raise UserError(f"{' and '.join(names)} both rank samples.  Remove one.")
    if names and not (isinstance(search, Sampling) and search.width > 1):
        raise UserError(f"{names[0]} chooses among samples.  Add --samples=16, for example.")


def suffix_of(options: DecodeOptions, vocabs: Vocabs) -> tuple[int, ...]:
    """Returns the tokens whose likelihood ranks samples; none without `rescore_suffix`."""
    if options.rescore_suffix is None:
        return ()
    ids = vocabs.target.encode_continuation(options.rescore_suffix)
    if not len(ids):
        raise UserError("--rescore_suffix: the text has no tokens.  Give one or more words.")
    return tuple(map(int, ids))


def check_tag(tag: str | None, task: Task) -> None:
    """Rejects a language tag for a task without languages."""
    if tag is not None and not task.has_source:
        raise UserError(f"--tag={tag}: {task.name} is not a translation task.  Remove the flag.")


@dataclasses.dataclass(frozen=True)
class LineDecoder:
    """Decodes lines of text: translates or continues them, depending on the task."""

    decoder: Decoder
    task: Task
    vocabs: Vocabs
    options: DecodeOptions
    max_length: int | None
    """The positions that the model has learned; None is no limit."""

    def requests(self, lines: Sequence[str], name: str | None = None) -> list[Request]:
        """Makes requests from lines; `name` is as in `translation_requests`."""
        task, options = self.task, self.options
        if options.max_tokens is not None and options.min_tokens > options.max_tokens:
            raise UserError(
                f"--min_tokens={options.min_tokens} is above --max_tokens={options.max_tokens}."
            )
        if task.has_source:
            return translation_requests(lines, task, self.vocabs, options, self.max_length, name)
        check_tag(options.tag, task)
        check_prefix(options, task)
        prompts = list(map(task.prompt, lines))
        requests = continuation_requests(
            prompts, self.vocabs, options, self.max_length, task.length // 2
        )
        return [request._replace(is_answer=task.has_answers) for request in requests]

    def decode(
        self, requests: Sequence[Request], lines: Sequence[int]
    ) -> Iterator[list[tuple[int, list[Hypothesis]]]]:
        """Yields batches of line numbers with their texts, the best first.

        The translation of an empty source is empty.
        """
        if blank := [line for line in lines if is_blank(requests[line], self.vocabs)]:
            yield [(line, [Hypothesis("", 0.0, 0.0)]) for line in blank]
            lines = [line for line in lines if not is_blank(requests[line], self.vocabs)]
        for batch in self.decoder.decode([requests[line] for line in lines]):
            decoded = list[tuple[int, list[Hypothesis]]]()
            for line, texts in ((lines[i], with_finite_score(texts)) for i, texts in batch):
                hypotheses = [to_hypothesis(requests[line], one, self.vocabs) for one in texts]
                decoded.append((line, rank(hypotheses, self.options)))
            yield decoded

    def best_texts(
        self, requests: Sequence[Request], progress: Progress = no_progress
    ) -> list[str]:
        """Decodes the requests and returns the best text of each, in order."""
        texts, done = [""] * len(requests), 0
        for batch in self.decode(requests, range(len(requests))):
            for line, hypotheses in batch:
                texts[line] = hypotheses[0].text
            done += len(batch)
            progress(done, len(requests))
        return texts
