"""Lets lm-evaluation-harness score and continue texts with a trained model, under its layout."""

import dataclasses
import functools
import itertools
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from configs.errors import UserError, brief
from data.packing.best_fit import BestFit
from data.packing.pack import OPEN_ROWS, SIDES
from data.packing.rows import Counts, PairRows, Rows, read_rows
from data.sources.pairs import chosen_tag, tagged
from data.task import Task
from data.tokenizers.chat_template import BadMessages, ChatTemplate, chat_template
from models.decoding.sampling import Sampling
from trainer.checkpoints.restore import TrainedModel
from trainer.decoding.decoder import Request, with_finite_score
from trainer.decoding.requests import LineDecoder, check_tag
from trainer.decoding.score import row_losses
from trainer.evaluate import Progress, no_progress

logger = logging.getLogger(__name__)

MAX_NEW_TOKENS = 256  # the default of the harness's other backends
FIRST_NEW_TOKENS = 32  # of greedy decoding before the first check for stops: answers are short

Text = tuple[list[int], list[int], int]
"""The tokens of a text, the tokens that an encoder reads, and how many last tokens are scored."""


class ScoredRows(Rows):
    """Holds rows of texts with explicit inputs, since a text may begin with any token."""

    def batch(self, row_ids: np.ndarray) -> dict[str, np.ndarray]:
        (inputs_BL,) = read_rows(row_ids, self.arrays["inputs"])
        return {**super().batch(row_ids), "inputs_BL": inputs_BL}


class ScoredPairs(ScoredRows, PairRows):
    """Holds rows of targets, and of sources that an encoder reads."""


class HarnessModel(TemplateLM):
    """Answers the requests of lm-evaluation-harness like its Hugging Face backend.

    With an encoder, the context is the source and the continuation is the target.  All processes
    of a run get all requests.
    """

    def __init__(
        self,
        trained: TrainedModel,
        batch_sequences: int,
        make_decoder: Callable[[], LineDecoder],
        tag: str | None = None,
        progress: Progress = no_progress,
    ):
        super().__init__()
        self.trained, self.batch_sequences, self.progress = trained, batch_sequences, progress
        self.task, self.vocabs = trained.run.task, trained.vocabs
        self.make_decoder = functools.cache(make_decoder)
        check_tag(tag, self.task)
        self.tag = chosen_tag(tag, self.task.tags) if self.task.has_source else None
        self._template: ChatTemplate | None = None
        length = f"{type(self.task).__name__}.length"
        self._row = f"{self.task.length}, the length of a row (--gin_param={length}=N)"
        self.backend = "seq2seq" if self.task.has_source else "causal"

    @property
    def eot_token_id(self) -> int:
        return self.vocabs.target.end_id

    @property
    def prefix_token_id(self) -> int:
        """Returns the token that stands for an empty context."""
        vocabs = self.vocabs
        return vocabs.of_source.end_id if self.task.has_source else vocabs.target.begin_id

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: object
    ) -> list[int]:
        """Tokenizes a context or, without special tokens, a continuation."""
        vocab, is_context = self.vocabs.target, add_special_tokens is not False
        if self.task.has_source and is_context:
            vocab = self.vocabs.of_source
            return [*vocab.encode([tagged(string, self.tag)])[0].tolist(), vocab.end_id]
        ids = vocab.encode([string.strip() if self.task.has_source else string])[0].tolist()
        reads_begin = is_context and vocab.reads_begin and ids[:1] != [vocab.begin_id]
        return [vocab.begin_id, *ids] if reads_begin else ids

    loglikelihood = functools.partialmethod(TemplateLM.loglikelihood, disable_tqdm=True)

    def loglikelihood_rolling(
        self, requests: Sequence[Instance], disable_tqdm: bool = True
    ) -> list[float]:
        """Scores complete texts, in windows if they are longer than a row."""
        task, vocab, windows = self.task, self.vocabs.target, []
        if task.has_source and requests:
            raise UserError(f"--harness={requests[0].task_name}: it needs a model with no encoder.")
        # The harness also scores the begin token, if the tokenizer writes one.
        special = False if vocab.begin_id in (vocab.pad_id, vocab.end_id) else None
        for (text,) in (request.args for request in requests):
            tokens = self.tok_encode(text, special)
            of_text = get_rolling_token_windows(tokens, vocab.begin_id, task.length, 1)
            windows.append([(("", text), *make_disjoint_window(window)) for window in of_text])
        scores = iter(self._loglikelihood_tokens([*itertools.chain(*windows)]))
        return [sum(score for score, _ in itertools.islice(scores, len(w))) for w in windows]

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[tuple[str, str], list[int], list[int]]], **kwargs: object
    ) -> list[tuple[float, bool]]:
        """Returns the log-likelihood of each continuation, and whether greedy decoding gives it."""
        task, trained, begin_id = self.task, self.trained, self.vocabs.target.begin_id
        texts, cut = list[Text](), 0
        for (_, text), context, continuation in requests:
            if not 0 < len(continuation) <= task.length:
                raise UserError(
                    f"--harness: the continuation {brief(repr(text))} has {len(continuation)} "
                    f"tokens.  Legal: 1 to {self._row}."
                )
            before, source = ([begin_id], context) if task.has_source else (context, [])
            tokens = [*before, *continuation]
            kept = tokens[-task.length - 1 :], source[-task.row_lengths.get("source_length", 1) :]
            cut += kept != (tokens, source)
            texts.append((*kept, len(continuation)))
        self._warn_of(cut, len(requests))
        if not texts:
            return []
        rows, places = pack_texts(texts, task)
        losses_BL, is_likeliest_BL = row_losses(trained, rows, self.batch_sequences, self.progress)
        return [(-float(losses_BL[at].sum()), bool(is_likeliest_BL[at].all())) for at in places]

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = True) -> list[str]:
        """Continues contexts up to a stop, the end of the text or a maximum number of tokens."""
        by_settings: dict[str, list[int]] = {}
        for i, request in enumerate(requests):
            by_settings.setdefault(json.dumps(request.args[1], sort_keys=True), []).append(i)
        answers = dict[int, str]()
        for settings, indices in by_settings.items():
            contexts = [self.tok_encode(requests[i].args[0]) for i in indices]
            answers |= zip(indices, self._answers(contexts, json.loads(settings)), strict=True)
        return [answers[i] for i in range(len(requests))]

    def _answers(self, contexts: Sequence[list[int]], settings: Mapping[str, Any]) -> list[str]:
        task, vocab = self.task, self.vocabs.target
        search, max_new_tokens, stops = generation_of(settings)
        if max_new_tokens >= task.length:
            raise UserError(
                f"--harness: {max_new_tokens} new tokens (max_gen_toks of the task's "
                f"generation_kwargs).  Legal: less than {self._row}."
            )
        room = task.row_lengths.get("source_length", task.length - max_new_tokens)
        kept = [context[-room:] for context in contexts]
        self._warn_of(sum(len(context) > room for context in contexts), len(contexts))
        # A decoder's context has its begin token, unless it lost its beginning.
        has_source = task.has_source
        decoder = self.make_decoder().decoder
        decoder = dataclasses.replace(decoder, search=search, reads_begin=has_source)
        first = max_new_tokens if search.temperature else min(max_new_tokens, FIRST_NEW_TOKENS)
        prompts, sources = ([[]] * len(kept), kept) if has_source else (kept, [None] * len(kept))
        tokens, texts = [list[int]() for _ in kept], [""] * len(kept)
        left = [*range(len(kept))]
        for new in filter(None, (first, max_new_tokens - first)):
            requests = [Request(prompts[i] + tokens[i], new, i, source=sources[i]) for i in left]
            batch_of, left = left, []
            for batch in decoder.decode(requests):
                for request, made in batch:
                    i, best = batch_of[request], with_finite_score(made)[0]
                    tokens[i] += best.tokens
                    text = vocab.decode(tokens[i])
                    texts[i] = min((text.split(stop)[0] for stop in stops), key=len, default=text)
                    if len(best.tokens) == new and texts[i] == text:
                        left.append(i)
                self.progress(len(batch_of) - len(left), len(kept))
        return texts

    def _warn_of(self, cut: int, contexts: int) -> None:
        if cut:
            text = "Warning: %d of %d contexts do not fit a row (%s): their beginnings are cut."
            logger.warning(text, cut, contexts, self.task.row_lengths)

    @property
    def tokenizer_name(self) -> str:
        """Returns the name under which the harness caches rendered chats."""
        return self.vocabs.target.hash

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Renders a chat with the template of the model's tokenizer."""
        if not add_generation_prompt:
            raise UserError("--apply_chat_template: not with a task that has a gen_prefix.")
        vocab = self.vocabs.target
        end = vocab.pieces([vocab.end_id])
        self._template = self._template or chat_template(vocab.files, *end)
        if self._template is None:
            raise UserError("--apply_chat_template: the model has no chat template.  Remove it.")
        try:
            return self._template.render(chat_history)
        except BadMessages as error:
            raise UserError(f"--apply_chat_template: the template refuses chats: {error}") from None


def generation_of(settings: Mapping[str, Any]) -> tuple[Sampling, int, list[str]]:
    """Returns the search, the number of new tokens and the stops of a task's generation_kwargs."""
    rest = dict(normalize_gen_kwargs(dict(settings), MAX_NEW_TOKENS))
    stops, max_new_tokens = [stop for stop in rest.pop("until") if stop], rest.pop("max_gen_toks")
    temperature, samples = rest.pop("temperature", 1.0), rest.pop("do_sample")
    limits = (temperature, rest.pop("top_k", None), rest.pop("top_p", None))
    min_p = rest.pop("min_p", 0.0)
    if rest:
        raise UserError(
            f"--harness: generation_kwargs of the task has {', '.join(rest)}.  Legal: until, "
            "max_gen_toks, do_sample, temperature, top_k, top_p, min_p."
        )
    search = Sampling(*limits, min_p=min_p) if samples else Sampling(temperature=0)
    return search, max_new_tokens, stops


def pack_texts(texts: Sequence[Text], task: Task) -> tuple[Rows, list[tuple[np.ndarray, slice]]]:
    """Packs texts as in training; also returns the row and the slice of the tokens to score."""
    lengths = [*task.row_lengths.values()]
    sizes = [[len(tokens) - 1, len(source)] for tokens, source, _ in texts]
    fit = BestFit(lengths, OPEN_ROWS if task.packs else 0)
    placed = fit.put(np.array(sizes)[:, : len(lengths)])
    arrays = dict[str, np.ndarray]()
    for names, length in zip(SIDES, lengths, strict=False):
        arrays |= {name: np.zeros((fit.opened, length), np.int32) for name in names}
    arrays["inputs"], places = np.zeros_like(arrays["targets"]), []
    for (tokens, source, scored), row, starts, segment in zip(texts, *placed, strict=True):
        halves = (tokens[1:], source)
        for (name, segments), start, half in zip(SIDES, starts, halves, strict=False):
            place = row, slice(start, start + len(half))
            arrays[name][place], arrays[segments][place] = half, segment
        end = starts[0] + len(tokens) - 1
        arrays["inputs"][row, starts[0] : end] = tokens[:-1]
        places.append((row, slice(end - scored, end)))
    return (ScoredPairs if task.has_source else ScoredRows)(arrays, Counts()), places
